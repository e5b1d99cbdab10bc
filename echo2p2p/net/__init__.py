"""The shells: the ports and their real forms (trio, aiohttp, SQLite, TLS, processes)."""
