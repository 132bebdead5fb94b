"""Query and cancel Slurm jobs, by Slurm's commands. The Jupyter server imports this module without ipyparallel."""

from __future__ import annotations

import re
import subprocess

from speedlab.cluster.errors import ClusterError


def slurm_state(number: str) -> tuple[str, str]:
    """Return the state of a job.

    Args:
        number: Number of the job.

    Returns:
        (state, description), such as ("PENDING", "is queued, 3rd of 7 in a100 (Resources)").

    Raises:
        ClusterError: If Slurm does not answer.
    """
    known = ask_slurm("squeue", "-h", "-j", number, "-t", "all", "-o", "%T|%r|%P|%S")
    if not known:
        shown = dict(re.findall(r"(\w+)=(\S*)", ask_slurm("scontrol", "-o", "show", "job", number)))
        return shown.get("JobState", "GONE"), shown.get("Reason", "")
    state, reason, partition, start = known.splitlines()[0].split("|")
    if state != "PENDING":
        return state, reason
    # Highest priority first, the order of the scheduler.
    waiting = ask_slurm("squeue", "-h", "-t", "PENDING", "-p", partition, "--sort=-p,i", "-o", "%i").split()
    place = f", {ordinal(waiting.index(number) + 1)} of {len(waiting)}" if number in waiting else ""
    expected = f", expected to start {start}" if start not in ("N/A", "") else ""
    return state, f"is queued{place} in {partition} ({reason}){expected}"


def ordinal(number: int) -> str:
    """Return '1st', '2nd', '3rd', '4th', '11th', '21st'."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def slurm_cancel(number: str) -> None:
    """Cancel a job that waits or runs; an ended job is no error."""
    ask_slurm("scancel", number)


def ask_slurm(*command: str) -> str:
    """Run a Slurm command and return its output; an unknown job is no error.

    Args:
        *command: Command and arguments.

    Raises:
        ClusterError: If the command fails or does not answer within 30 s.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except FileNotFoundError:
        raise ClusterError(f"no Slurm here: {command[0]} is not found") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"Slurm does not answer: {command[0]} said nothing within 30 s") from None
    if done.returncode and "Invalid job id" not in done.stderr:
        raise ClusterError(f"Slurm does not answer: {error_lines(done.stderr)}")
    return done.stdout.strip()


def error_lines(text: str | None) -> str:
    """Return the error output of a command as one line."""
    return " ".join(line.strip() for line in (text or "").splitlines() if line.strip()) or "(it says nothing)"
