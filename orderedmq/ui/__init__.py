"""The web pages of ``orderedmq ui``: a broker's groups and topics, their owners and lag, and ways to repair them; also the
broker's metrics, which ``orderedmq exporter`` serves without the pages.

Rules: the pages call the same functions of `orderedmq.tools` as the command and contain no logic of that kind themselves. Only
the command imports this package. The server renders complete pages, which work without JavaScript; one script fetches the same
rendering again. Starlette, Jinja2 and uvicorn come with the extra ``ui``, and only these modules import them. The exporter needs
no Jinja2.
"""
