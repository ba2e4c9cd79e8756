"""Conversion of adapter folders of PEFT."""
