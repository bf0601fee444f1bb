"""The web pages of ``orderedmq ui``, which show and repair a broker's groups and topics, and the broker's metrics, which
``orderedmq exporter`` serves without the pages.

Rules: the pages call the same functions of `orderedmq.tools` as the command, so that they contain no logic about brokers. Only
the command imports this package. The server renders complete pages, which work without JavaScript. One script refreshes their
live parts. Starlette, Jinja2 and uvicorn come with the extra ``ui``, and only these modules import them. The exporter needs no
Jinja2.
"""
