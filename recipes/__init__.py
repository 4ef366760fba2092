"""Named runs: functions that return one complete config."""
