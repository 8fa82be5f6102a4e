"""Load whose every answer is known in advance, for faults to be let loose on."""
