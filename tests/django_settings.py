"""Settings of Django, which a process has once, for all tests that need them."""

from __future__ import annotations

import tempfile

import django
import django.conf

_FOLDER = tempfile.TemporaryDirectory(prefix="tenure-")  # removed when the process ends


def configure_django() -> None:
    """Configure Django with a SQLite file as its database, unless it is configured."""
    if django.conf.settings.configured:
        return
    path = _FOLDER.name + "/data.db"
    engine = {"ENGINE": "django.db.backends.sqlite3", "NAME": path}
    django.conf.settings.configure(DATABASES={"default": engine}, LOGGING_CONFIG=None)
    django.setup()
