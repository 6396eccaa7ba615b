"""The parts of secure sums, against numbers by hand, published test vectors and properties."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bespoke.messages.secure.fixed_point import FixedPoint
from bespoke.messages.secure.keys import AgreementKey, Identity, derived, seal, stream, unseal, verify
from bespoke.messages.secure.masking import add_mask, pair_key, sign
from bespoke.messages.secure.refused import Overflow, Refused, TooFew
from bespoke.messages.secure.shamir import PRIME, SHARE_BYTES, join, split

TERMS = bytes(range(32))


def words(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


# -- fixed point ---------------------------------------------------------------------------------------------------
def test_fixed_point_by_hand() -> None:
    """With 8 bits behind the point: 1.5 is 384, -1/256 is 2^64 - 1, and 0.3 = 76.8 / 256 is rounded to 77."""
    point = FixedPoint(8, 4)
    assert point.encode(np.array([1.5, -1 / 256, 0.3])).tolist() == [384, 2**64 - 1, 77]
    assert point.decode(words(384, 2**64 - 1, 77)).tolist() == [1.5, -1 / 256, 77 / 256]
    assert point.limit == 2.0**54 / 4
    assert point.error(3) == 3 / 512


@given(
    st.lists(st.floats(-1e6, 1e6, allow_nan=False), min_size=1, max_size=8),
    st.integers(8, 40),
)
@settings(max_examples=50, deadline=None)
def test_sums_are_off_by_half_a_step_a_client(values: list[float], bits: int) -> None:
    point = FixedPoint(bits, len(values))
    kept = [value for value in values if abs(value) <= point.limit]
    total = sum((point.encode(np.array([value])) for value in kept), np.zeros(1, np.uint64))
    found, exact = Fraction(int(total.view(np.int64)[0]), 2**bits), sum(map(Fraction, kept), Fraction())
    assert abs(found - exact) <= Fraction(len(kept), 2 ** (bits + 1)) == Fraction(point.error(len(kept)))
    assert point.decode(total)[0] == float(found)


@pytest.mark.parametrize("value", [1.1 * 2**30 / 5, -1.1 * 2**30 / 5, np.inf, np.nan, 1e300])
def test_what_could_overflow_is_refused(value: float) -> None:
    point = FixedPoint(32, 5)
    with pytest.raises(Overflow, match=r"largest that each of 5 clients.*secure\.bits = 32") as refusal:
        point.encode(np.array([0.0, value]))
    assert refusal.value.place == 1


def test_at_the_limit_all_clients_together_do_not_overflow() -> None:
    point = FixedPoint(32, 7)
    total = np.zeros(1, np.uint64)
    for _ in range(7):
        total += point.encode(np.array([-point.limit]))
    assert point.decode(total)[0] == pytest.approx(-(2.0**30))


# -- Shamir ------------------------------------------------------------------------------------------------------------
def test_shares_are_values_of_the_polynomial() -> None:
    """f(x) = 1234 + 166 x + 94 x^2: f(1) = 1494, f(2) = 1942, f(3) = 2578, f(5) = 4414."""
    coefficients = iter((166, 94))
    shares = split((1234).to_bytes(32, "big"), [1, 2, 3, 5], 3, lambda _: next(coefficients))
    assert {x: int.from_bytes(share, "big") for x, share in shares.items()} == {1: 1494, 2: 1942, 3: 2578, 5: 4414}
    assert join({x: shares[x] for x in (2, 3, 5)}, 3) == (1234).to_bytes(32, "big")


def test_the_field_is_prime_and_holds_every_secret() -> None:
    """2^256 + 297: Fermat's test for several bases, and no smaller number above 2^256 passes it for 3."""
    assert PRIME > 2**256
    assert PRIME < 2 ** (8 * SHARE_BYTES)
    assert all(pow(base, PRIME - 1, PRIME) == 1 for base in (2, 3, 5, 7, 11, 13))
    assert not any(pow(3, number - 1, number) == 1 for number in range(2**256 + 1, PRIME, 2))


@given(st.binary(min_size=32, max_size=32), st.integers(2, 6), st.data())
@settings(max_examples=25, deadline=None)
def test_any_threshold_of_the_holders_find_the_secret(secret: bytes, many: int, data: st.DataObject) -> None:
    threshold = data.draw(st.integers(1, many))
    shares = split(secret, list(range(1, many + 1)), threshold)
    for holders in itertools.combinations(shares, threshold):
        assert join({x: shares[x] for x in holders}, threshold) == secret
    with pytest.raises(TooFew):
        join({x: shares[x] for x in list(shares)[: threshold - 1]}, threshold)


def test_too_few_shares_fit_every_secret() -> None:
    """Two of three holders: for the share of one holder there is, to every secret, exactly one share of another."""
    one = int.from_bytes(split(bytes(31) + b"\x07", [1, 2, 3], 2)[1], "big")
    for secret in (0, 7, 2**255):
        slope = (one - secret) % PRIME
        other = (secret + 2 * slope) % PRIME
        shares = {1: one.to_bytes(SHARE_BYTES, "big"), 2: other.to_bytes(SHARE_BYTES, "big")}
        assert join(shares, 2) == secret.to_bytes(32, "big")


# -- keys --------------------------------------------------------------------------------------------------------------
def test_x25519_against_rfc_7748() -> None:
    """Section 6.1: the keys of Alice and Bob, and what they agree on."""
    alice = AgreementKey(bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a"))
    bob = AgreementKey(bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"))
    assert alice.public.hex() == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    assert bob.public.hex() == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    agreed = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert alice.agree(bob.public).hex() == bob.agree(alice.public).hex() == agreed


def test_hkdf_against_rfc_5869() -> None:
    """Test case 1 of appendix A, its first 32 bytes."""
    found = derived(bytes([0x0B] * 22), bytes(range(13)), bytes(range(0xF0, 0xFA)))
    assert found.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"


def test_a_key_of_small_order_is_refused() -> None:
    with pytest.raises(Refused, match="no key that can be agreed with"):
        AgreementKey().agree(bytes(32))


def test_chacha20_against_rfc_8439() -> None:
    """Appendix A.1, test vector 1 and 2: the keystream of a zero key and nonce, blocks 0 and 1."""
    expected = (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
    )
    found = np.concatenate([block.copy() for _, block in stream(bytes(32), 16)])
    assert found.astype("<u8").tobytes().hex() == expected


def test_streams_do_not_depend_on_blocks() -> None:
    long = np.concatenate([block.copy() for _, block in stream(TERMS, 20_000)])
    short = np.concatenate([block.copy() for _, block in stream(TERMS, 9_001)])
    assert np.array_equal(long[:9_001], short)
    assert len(np.unique(long)) == 20_000


def test_derived_keys_differ_by_purpose_and_terms() -> None:
    secret = b"s" * 32
    keys = {derived(secret, TERMS, b"a"), derived(secret, TERMS, b"b"), derived(secret, TERMS[::-1], b"a")}
    assert len(keys) == 3


def test_what_was_sealed_is_opened_by_its_key_alone() -> None:
    key = derived(b"s" * 32, TERMS, b"shares")
    sealed = seal(key, b"a share", TERMS)
    assert b"a share" not in sealed
    assert unseal(key, sealed, TERMS, "it") == b"a share"
    for wrong in ((TERMS, sealed, TERMS), (key, sealed[:-1] + b"\0", TERMS), (key, sealed, TERMS[::-1])):
        with pytest.raises(Refused, match="was changed on its way"):
            unseal(*wrong, "it")


def test_signatures_of_others_and_of_other_messages_are_refused() -> None:
    one, other = Identity(), Identity()
    signature = one.sign(b"hello")
    verify(one.public, signature, b"hello", "it")
    for public, message in ((other.public, b"hello"), (one.public, b"hallo")):
        with pytest.raises(Refused, match="not signed"):
            verify(public, signature, message, "it")


# -- masks -------------------------------------------------------------------------------------------------------------
def test_masks_of_two_clients_cancel() -> None:
    """Both make the same stream from their own half of the keys; one adds it, the other subtracts it."""
    low, high = AgreementKey(), AgreementKey()
    mine, theirs = pair_key(low, 0, high.public, 1, TERMS), pair_key(high, 1, low.public, 0, TERMS)
    assert mine == theirs
    a, b = words(10, 20, 30), words(1, 2, 2**64 - 1)
    add_mask(a, mine, sign(0, 1))
    add_mask(b, theirs, sign(1, 0))
    first = np.concatenate([block.copy() for _, block in stream(mine, 3)])
    assert a.tolist() == [(x + int(m)) % 2**64 for x, m in zip((10, 20, 30), first)]
    assert b.tolist() == [(x - int(m)) % 2**64 for x, m in zip((1, 2, 2**64 - 1), first)]
    assert (a + b).tolist() == [11, 22, 29]
