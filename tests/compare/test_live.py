"""Progress: plain lines where there is no terminal."""

from compare import live as module
from compare.live import live


def test_time_left_is_that_of_the_phase(monkeypatch, capsys):
    now = iter([0.0, 0.0, 20.0, 40.0, 60.0, 80.0, 100.0, 120.0, 130.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    with live("speed") as progress:
        progress("warming up", 2, 10)  # at 20 s
        progress("timing", 4, 10)  # at 40 s: two steps in 20 s, six to go
        progress("first call", 0, 6)  # at 60 s: another phase
        progress("first call", 1, 6)  # at 80 s: one in 20 s, five to go
        progress("second call", 0, 6)  # at 100 s: a phase as long as the last
        progress("second call", 3, 6)  # at 120 s: three in 20 s, three to go
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
        "speed ...",
        "warming up 2/10",
        "timing 4/10 1:00 left",
        "first call 0/6",
        "first call 1/6 1:40 left",
        "second call 0/6",
        "second call 3/6 0:20 left",
        "speed: 2:10",
    ]
