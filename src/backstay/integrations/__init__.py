"""Backstay under the names of other frameworks: one package each, and nothing else imports them."""
