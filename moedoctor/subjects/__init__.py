"""Subjects: the implementations that are put to the test, one file each kind."""
