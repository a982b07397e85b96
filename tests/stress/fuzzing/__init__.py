"""What tests/stress/fuzz.py and tests/fuzz throw at the program, and what must hold then."""
