"""benchmarks/many_clients.py: what its section of docs/speed.md says of numbers that were measured."""

from many_clients import section


def test_what_another_client_costs_lies_between_the_two_largest_sizes() -> None:
    sizes = [(100, 9.0, 0.9), (1_000, 10.0, 1.0), (3_000, 20.0, 1.5)]
    text = section([{"clients": n, "cpu": cpu, "gigabytes": memory, "disk": 0.25} for n, cpu, memory in sizes])
    assert "| 3,000 | 20.0 | 6667 | 1.50 | 0.25 |" in text
    # 10 s of 2,000 clients are 5 ms; half of 2^20 kB are 262.1 kB
    assert "From 1,000 to 3,000 clients, each additional client costs 5000 us of CPU and 262.1 kB of memory." in text
    # half a GB for 2,000 clients is 249.25 GB for the 997,000 that are missing
    assert "At this rate 1,000,000 clients would need 250.8 GB. This was not measured." in text
    whole = [{"clients": n, "cpu": 1.0, "gigabytes": 1.0, "disk": 0.25} for n in (1_000, 1_000_000)]
    assert "not measured" not in section(whole)
    assert "additional" not in section([{"clients": 5, "cpu": 1.0, "gigabytes": 1.0, "disk": 0.1}])
