"""The embedded model `tiny`: its training, its evaluation and, in `checkpoint/`, its weights with their card."""
