"""For all tests."""

from left_out import pytest_configure, pytest_deselected, pytest_terminal_summary

__all__ = ["pytest_configure", "pytest_deselected", "pytest_terminal_summary"]
