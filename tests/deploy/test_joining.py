"""Keys, requests and approvals, without a process: who learns what, and what is refused."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from bespoke.deploy.federated.identities import Papers
from bespoke.deploy.flare.authority import Authority, accept, approve, request, request_fingerprint
from bespoke.deploy.flare.executor import papers_of
from bespoke.deploy.flare.hardened import check_kit
from bespoke.deploy.flare.keys import pem, read_key
from bespoke.deploy.flare.kit import write_site
from bespoke.deploy.flare.loopback import Loopback, make_loopback
from bespoke.deploy.flare.project import Hub, SiteSettings, check, read_hub
from bespoke.digests import sealed
from bespoke.errors import UserError
from command import bespoke


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Loopback:
    """A project on disk; nothing of it runs."""
    return make_loopback(tmp_path_factory.mktemp("made"), ("north", "south"))


def settings(made: Loopback, name: str = "north", **changed: Any) -> SiteSettings:
    authority = Authority.load(made.kit.parent / "authority")
    said = {"name": name, "org": f"org-{name}", "project": made.hub.name, "server": made.hub.server,
            "port": made.hub.port, "fingerprint": authority.fingerprint}  # fmt: skip
    return check({**said, **changed}, SiteSettings, "site.toml")


# -- the site's key ---------------------------------------------------------------------------------------------------
def traces(key_file: Path) -> list[bytes]:
    """What a private key could look like in a file: its secret numbers as bytes, and pieces of its PEM text."""
    numbers = read_key(key_file).private_numbers()
    secret = [numbers.p, numbers.q, numbers.d, numbers.dmp1, numbers.dmq1, numbers.iqmp]
    raw = [number.to_bytes((number.bit_length() + 7) // 8, "big") for number in secret]
    lines = key_file.read_bytes().splitlines()[4:-2]
    return [*raw, *(base64.b64encode(number)[:60] for number in raw), *lines]


def holds(folder: Path, found: list[bytes]) -> list[Path]:
    """Files with one of these in them, also inside of zip files."""
    hits = []
    for path in folder.rglob("*"):
        if path.is_file():
            contents = [path.read_bytes()]
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    contents += [archive.read(name) for name in archive.namelist()]
            if any(trace in content for trace in found for content in contents):
                hits.append(path)
    return hits


def test_the_key_of_a_site_stays_in_its_folder(made: Loopback, tmp_path: Path) -> None:
    folder = made.sites["north"].parent
    found = traces(folder / "site.key")
    assert sorted(path.relative_to(folder) for path in holds(folder, found)) == [
        Path("kit/startup/client.key"), Path("site.key"),
    ]  # fmt: skip
    for path in folder.glob("*.zip"):  # what travels
        shutil.copy(path, tmp_path)
    assert holds(tmp_path, found) == []
    assert holds(made.kit.parent, found) == []
    assert holds(made.sites["south"].parent, found) == []


def test_nobody_else_on_the_machine_reads_keys(made: Loopback) -> None:
    for path in made.kit.parents[1].rglob("*.key"):
        assert path.stat().st_mode & 0o077 == 0, path
    for folder in (made.kit, made.kit.parent / "authority", *made.sites.values()):
        assert folder.stat().st_mode & 0o077 == 0, folder


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_certificates_by_openssl(made: Loopback, tmp_path: Path) -> None:
    """A site's certificate is good for the site, and not for the hub's name; it signs no others."""
    root = made.kit / "startup/rootCA.pem"
    site, hub = made.sites["north"] / "startup/client.crt", made.kit / "startup/server.crt"

    def verified(purpose: str, *more: object) -> bool:
        command = ["openssl", "verify", "-x509_strict", "-CAfile", root, "-purpose", purpose, *more]
        return subprocess.run([str(word) for word in command], capture_output=True).returncode == 0

    assert verified("sslclient", site)
    assert not verified("sslserver", "-verify_hostname", "localhost", site)
    assert verified("sslserver", "-verify_hostname", "localhost", hub)
    assert not verified("sslserver", "-verify_hostname", "elsewhere.org", hub)
    key = read_key(site.with_name("client.key"))
    own = Authority(tmp_path, x509.load_pem_x509_certificate(site.read_bytes()), key)
    (tmp_path / "evil.crt").write_bytes(pem(own.sign("evil", "evil", "client", key.public_key(), 1)))
    assert not verified("sslclient", "-untrusted", site, tmp_path / "evil.crt")
    subject = subprocess.run(
        ["openssl", "x509", "-in", str(site), "-noout", "-subject", "-nameopt", "RFC2253"],
        capture_output=True,
        text=True,
    ).stdout
    assert "CN=north" in subject
    assert "O=org-north" in subject


# -- requests ---------------------------------------------------------------------------------------------------------
def test_requests_that_the_hub_refuses(made: Loopback, tmp_path: Path) -> None:
    authority = Authority.load(made.kit.parent / "authority")

    def asked(name: str = "north", **changed: Any) -> Path:
        return request(settings(made, name, **changed), tmp_path / name)

    with pytest.raises(UserError, match="'east' is not in the hub's list"):
        approve(authority, made.hub, asked("east"))
    with pytest.raises(UserError, match="the project 'other'; this hub's is 'demo'"):
        approve(authority, made.hub, asked("south", project="other"))
    with pytest.raises(UserError, match="has a certificate for another key"):
        approve(authority, made.hub, asked("north"))  # a new key, in another folder
    assert approve(authority, made.hub, asked("north"), again=True).name == "north.approved.zip"


def changed_zip(path: Path, target: Path, change: Callable[[dict[str, bytes]], object]) -> Path:
    """A copy of a zip file with other contents."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    change(files)
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return target


def test_a_request_that_was_changed_on_its_way(made: Loopback, tmp_path: Path) -> None:
    authority = Authority.load(made.kit.parent / "authority")
    mine = made.sites["north"].parent / "north.request.zip"

    def refused(change: Callable[[dict[str, bytes]], object], said: str) -> None:
        with pytest.raises(UserError, match=said):
            approve(authority, made.hub, changed_zip(mine, tmp_path / "changed.zip", change), out=tmp_path / "out.zip")

    def renamed(files: dict[str, bytes]) -> None:
        files["request.json"] = files["request.json"].replace(b'"north"', b'"south"')

    def flipped(files: dict[str, bytes]) -> None:
        asked = x509.load_pem_x509_csr(files["request.csr"])
        der = bytearray(asked.public_bytes(serialization.Encoding.DER))
        der[-5] ^= 1
        text = base64.encodebytes(bytes(der))
        files["request.csr"] = b"-----BEGIN CERTIFICATE REQUEST-----\n" + text + b"-----END CERTIFICATE REQUEST-----\n"

    refused(renamed, "do not agree")
    refused(flipped, "not signed by an RSA key")
    refused(lambda files: files.update({"../evil": b""}), "expected")
    refused(lambda files: files.update({"request.csr": b"x" * 2**21}), "larger than")
    assert not (tmp_path / "out.zip").exists()


# -- approvals --------------------------------------------------------------------------------------------------------
def test_an_approval_that_the_site_refuses(made: Loopback, tmp_path: Path) -> None:
    folder = made.sites["north"].parent
    mine = folder / "north.approved.zip"
    assert accept(settings(made), folder, mine).said["project"] == "demo"

    def refused(said: str, path: Path = mine, **changed: Any) -> None:
        with pytest.raises(UserError, match=said):
            accept(settings(made, **changed), folder, path)

    def with_change(change: Callable[[dict[str, bytes]], object]) -> Path:
        return changed_zip(mine, tmp_path / "changed.zip", change)

    refused("ask the hub by telephone", fingerprint="0" * 64)
    refused("not signed by the project's authority", with_change(lambda files: files.update({"schema.json": b"{}"})))
    refused("not signed by the project's authority", with_change(
        lambda files: files.update({"approval.json": files["approval.json"].replace(b'"least": 3', b'"least": 1')})
    ))  # fmt: skip
    refused("is for another key", made.sites["south"].parent / "south.approved.zip", name="south", org="org-south")
    refused("org = 'org-north', but site.toml says 'other'", org="other")
    other = Authority.create(tmp_path / "other", "demo", 30)
    ours = approve(other, made.hub, folder / "north.request.zip", out=tmp_path / "ours.zip")
    refused("ask the hub by telephone", ours)
    both = with_change(lambda files: files.update({"site.crt": zipfile.ZipFile(ours).read("site.crt")}))
    refused("not signed by the project's authority", both)


def test_a_kit_is_made_again_after_a_new_approval(made: Loopback, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made.sites["north"].parent, tmp_path / "north"))
    os.remove(folder / "kit/startup/client.crt")
    assert check_kit(write_site(settings(made), folder, folder / "north.approved.zip")) == "site"


# -- files that people write ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"servr": "x"}, "unknown key 'servr'.*Did you mean 'server'"),
        ({"name": "a b"}, "name = 'a b': it has to be up to 40 letters"),
        ({"sites": ["a1", "A1"]}, "the site 'a1' stands in sites twice"),
        ({"sites": ["a1", "server"]}, "'server' is the name of something else"),
        ({"sites": ["a1", "1e3"]}, "'1e3' is no name for FLARE"),
        ({"sites": ["a1", "no"]}, "'no' is no name for FLARE"),
        ({"sites": ["a1"], "min_sites": 2}, "min_sites = 2 is more than the 1 sites"),
        ({"port": 70000}, "port = 70000"),
        ({"schema": "s.json"}, r"schema needs a table \[columns\]"),
    ],
)
def test_mistakes_in_hub_toml(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    import tomli_w

    path = tmp_path / "hub.toml"
    path.write_text(tomli_w.dumps({"name": "p1", "server": "hub.org", "sites": ["s1", "s2"], **changed}))
    with pytest.raises(UserError, match=said):
        read_hub(path)


def test_what_a_consortium_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of docs/deploy.md up to the start, on one machine, in the order in which they are typed."""
    monkeypatch.chdir(tmp_path)
    rows = ["school,age,sex,score"] + [f"s{i % 4},{i % 7},{'fm'[i % 2]},{i % 5}.5" for i in range(40)]
    Path("rows.csv").write_text("\n".join(rows))
    schema = {"columns": {"age": {"kind": "number"}, "sex": {"kind": "category", "categories": ["f", "m"]}},
              "target": {"name": "score"}}  # fmt: skip
    Path("schema.json").write_text(json.dumps(schema))
    Path("hub.toml").write_text(
        'name = "exams"\nserver = "localhost"\nsites = ["north", "south"]\nschema = "schema.json"\n'
        '[columns]\nclient = "school"\n'
    )

    def does(*words: object) -> str:
        done = bespoke("deploy", *words)
        assert done.code == 0, done.err
        return done.out

    fingerprint = json.loads(does("init", "hub.toml", "--json"))["fingerprint"]
    assert f'fingerprint = "{fingerprint}"' in Path("hub/site.toml").read_text()
    refused = bespoke("deploy", "join", "hub/site.toml")
    assert refused.code == 2
    assert "name = ''" in refused.err
    text = Path("hub/site.toml").read_text().replace('name = ""', 'name = "north"').replace('org = ""', 'org = "uni"')
    Path("site.toml").write_text(text)
    key = does("join", "site.toml").split()
    assert bespoke("deploy", "site", "north", "--data", "rows.csv").code == 2  # no approval yet
    told = does("approve", "north/north.request.zip")
    assert (
        set(key) & set(told.split()) & {word for word in key if len(word) == 64}
    )  # both are told the same fingerprint
    assert does("site", "north", "--data", "rows.csv", "--check") == "rows.csv: 40 rows of 4 clients\n"
    (own,) = {word for word in key if len(word) == 64}
    assert f"  north: {own}\n" in (said := does("peers", "north"))
    assert "No other site is known yet" in said
    heard, agreed = "5" * 64, "b" * 64
    Path("north/state/secure").mkdir(parents=True)
    Path("north/state/secure/sites.json").write_text(json.dumps(sealed({"north": own, "south": heard})))
    assert "Heard through the hub, and not agreed on" in (said := does("peers", "north"))
    assert said.endswith(f'[peers]\nsouth = "{heard}"\n')
    before = Path("north/site.toml").read_text()
    Path("north/site.toml").write_text(f'{before}\n[peers]\nsouth = "{agreed}"\n')
    assert does("peers", "north").endswith(f'south = "{agreed}"\nAttention: the hub has said {heard} of south\n')
    assert json.loads(does("peers", "north", "--json"))["agreed"] == {"south": agreed}
    does("site", "north", "--data", "rows.csv", "--check")
    assert json.loads(Path("north/kit/local/bespoke.json").read_text())["peers"] == {"south": agreed}
    Path("north/site.toml").write_text(f'{before}\n[peers]\nsouth = "{agreed[1:]}"\n')
    refused = bespoke("deploy", "peers", "north")
    assert refused.code == 2
    assert "64 digits of 0-9 and a-f, as you were told by telephone" in refused.err
    Path("north/site.toml").write_text(before)
    settled = json.loads(Path("north/kit/local/bespoke.json").read_text())
    assert settled["data"] == str(tmp_path / "rows.csv")
    assert settled["columns"] == {"client": "school"}
    Path("bad.csv").write_text(Path("rows.csv").read_text().replace("sex", "gender"))
    refused = bespoke("deploy", "site", "north", "--data", "bad.csv", "--check")
    assert refused.code == 2
    assert "unknown column 'sex'" in refused.err
    Path("site.toml").write_text(
        text + "least = 9\n" if "least" not in text else text.replace("least = 3", "least = 9")
    )
    shutil.copy("site.toml", "north/site.toml")
    refused = bespoke("deploy", "site", "north", "--check")
    assert refused.code == 2
    assert "4 clients, and no sum of fewer than least = 9" in refused.err
    refused = bespoke("deploy", "init", "hub.toml")
    assert refused.code == 2
    assert "is not empty" in refused.err


def test_sites_vouch_for_their_clients_by_the_certificates_of_their_kits(made: Loopback) -> None:
    """Of the same authority: a site is believed, by the fingerprint that `join` has printed; nobody else is."""
    north, south = (papers_of(made.sites[name], {}) for name in ("north", "south"))
    found = north.check("00aa", south.vouch("00aa", bytes(32)))
    key = request_fingerprint(made.sites["south"].parent / "south.request.zip")
    assert (found.site, found.public, found.fingerprint) == ("south", bytes(32), key)
    for folder, name, role in ((made.kit, "server", "server"), (made.kit.parent / "admin", "client", "project_admin")):
        startup = folder / "startup"
        shown = x509.load_pem_x509_certificate((startup / f"{name}.crt").read_bytes())
        other = Papers(read_key(startup / f"{name}.key"), shown, north.root)
        with pytest.raises(UserError, match=f"which is no site's but a {role}'s"):
            north.check("00aa", other.vouch("00aa", bytes(32)))


def test_a_hub_toml_that_no_longer_fits_the_kit(made: Loopback) -> None:
    from bespoke.deploy.flare.kit import follow_list

    follow_list(made.kit, made.hub.model_copy(update={"sites": ["north"], "min_sites": 1}))
    assert json.loads((made.kit / "local/bespoke.json").read_text())["sites"] == ["north"]
    follow_list(made.kit, made.hub)
    moved = check({"name": "demo", "server": "elsewhere", "port": made.hub.port, "sites": ["north"], "min_sites": 1},
                  Hub, "hub.toml")  # fmt: skip
    with pytest.raises(UserError, match="cannot change after init"):
        follow_list(made.kit, moved)


@pytest.mark.parametrize("name", ["init", "join", "approve", "site", "peers", "hub", "harden"])
def test_help_teaches_by_example(name: str) -> None:
    told = bespoke("deploy", name, "--help")
    assert told.code == 0
    assert f"bespoke deploy {name} " in told.out.split("Usage:")[1].split("\n", 1)[1]  # besides the usage line
