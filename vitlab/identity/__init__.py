"""Identity of a trial: its key, and the digest of the code that it runs.

:mod:`~vitlab.identity.key` hashes what is trained, :mod:`~vitlab.identity.code` the modules that train it, whose source
text :mod:`~vitlab.identity.source` reads; :mod:`~vitlab.identity.trial` holds a trial as a value.
"""
