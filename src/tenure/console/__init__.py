"""Live console: a store in the browser, and as JSON.

``access`` is the door through which visitors come, and ``app`` makes the application. ``reading``
reads the store on a visitor's behalf, in pages. ``record`` and ``observer`` follow the store once
for all browsers, and ``live`` keeps open pages up to date. ``waits`` has the tasks that wait for
each other, and ``graph`` the layout of their picture. ``views`` turns what was read into pages
with the templates, and ``api`` into JSON, described by ``openapi``. ``service`` knows the visitors
and carries out what they change. ``security`` and ``signed_in`` guard requests.

The modules need the extra ``tenure[console]``; this one and ``access`` need nothing.
"""
