"""Implementations of others and of moedoctor, in the form in which `moedoctor.testing` asks them."""
