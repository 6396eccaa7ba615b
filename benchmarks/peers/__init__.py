"""The contestants of `benchmarks/speed.py`: one small file each, all driven the same way."""
