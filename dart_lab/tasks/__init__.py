"""Questions with answers: the drawn world ``shapes``, folders of pictures, and how answers are scored."""

from dart_lab.tasks.base import Sample, Task, load_task
from dart_lab.tasks.scoring import Score, is_right, normalise_answer, score_answers

__all__ = ["Sample", "Score", "Task", "is_right", "load_task", "normalise_answer", "score_answers"]
