"""The web page of ``orderedmq ui``: what a broker has, who owns it, how far behind it is, and what to do about it; and its metrics,
which ``orderedmq exporter`` serves alone.

Rules: it stands on the functions of `orderedmq.tools` that the command has, and decides nothing that they decide. Only the command
knows it. Pages are rendered here and are whole without JavaScript; one script of our own fetches the same rendering again. Starlette,
Jinja2 and uvicorn come with the extra ``ui`` and are imported by these modules alone. The exporter needs no Jinja2.
"""
