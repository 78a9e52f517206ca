"""Scored groups on their way to a step: checked, collected, waited for."""
