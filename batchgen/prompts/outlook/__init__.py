"""What a plan tells beyond its order: lengths, remainders, where shared text ends, failures."""
