"""Two small trainers and the adapters that a third party might write for them.

``site`` contains what their installation would put into ``site-packages``: the trainers, the
adapters and the entry points. ``docs/adding-a-framework.md`` shows these adapters unchanged.
"""
