"""What ends a run before its rows are done: signals, time, a hang, too many failed rows."""
