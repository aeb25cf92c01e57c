"""The peers' own test suites, run on cuflash from a copy that the user points at."""
