"""Adapter folders of PEFT."""
