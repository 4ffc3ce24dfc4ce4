"""One module a figure or table; installed as dart_lab.analysis."""
