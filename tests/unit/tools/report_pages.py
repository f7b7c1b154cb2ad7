"""Reads back the data in the page of a run."""

from __future__ import annotations

import base64
import gzip
import json
import re
from typing import Any


def unpack(text: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(text)))


def data_of(text: str) -> dict[str, Any]:
    script = re.search(r'id="data">([^<]*)<', text)
    assert script
    return unpack(script[1])
