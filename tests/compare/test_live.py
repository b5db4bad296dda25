"""Progress: plain lines where there is no terminal."""

from compare import live as module
from compare.live import live


def test_time_left_is_that_of_the_phase(monkeypatch, capsys):
    now = iter([0.0, 0.0, 20.0, 40.0, 60.0, 80.0, 90.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    with live("speed") as progress:
        progress("warming up", 2, 10)  # at 20 s
        progress("timing", 4, 10)  # at 40 s: two steps in 20 s, six to go
        progress("first call", 0, 6)  # at 60 s: another phase
        progress("first call", 1, 6)  # at 80 s: one in 20 s, five to go
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
        "speed ...",
        "warming up 2/10",
        "timing 4/10 1:00 left",
        "first call 0/6",
        "first call 1/6 1:40 left",
        "speed: 1:30",
    ]
