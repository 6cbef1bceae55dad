"""Means over seeds and over tasks, with their standard errors."""

from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from statistics import mean, stdev


MeanAndError = tuple[float, float | None]  # no error for a single seed


def mean_and_error(values: Sequence[float]) -> MeanAndError:
    """Return the mean and its standard error, which is the standard deviation / sqrt(n)."""
    if len(values) == 1:
        return values[0], None
    return mean(values), stdev(values) / sqrt(len(values))


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> MeanAndError:
    """Return the difference of two means over seeds, and its standard error.

    With the same seeds, it is the error of the differences by seed, otherwise that of two
    independent means.
    """
    if ours.keys() == theirs.keys():
        return mean_and_error([ours[seed] - theirs[seed] for seed in ours])
    our_mean, our_error = mean_and_error([*ours.values()])
    their_mean, their_error = mean_and_error([*theirs.values()])
    return our_mean - their_mean, error_of_sum([our_error, their_error])


def mean_over(values: Sequence[MeanAndError]) -> MeanAndError:
    """Return the mean over tasks, and its standard error; the tasks' seeds are independent."""
    error = error_of_sum(error_of_task for _, error_of_task in values)
    if error is not None:
        error /= len(values)
    return mean(mean_of_task for mean_of_task, _ in values), error


def error_of_sum(errors: Iterable[float | None]) -> float | None:
    """Return the standard error of a sum of independent means; None if one has no error."""
    squares = 0.0
    for error in errors:
        if error is None:
            return None
        squares += error**2
    return sqrt(squares)
