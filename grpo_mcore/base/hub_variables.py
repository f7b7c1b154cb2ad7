"""Names of environment variables that say where models and data come from: every process that loads some needs them."""

from __future__ import annotations

CACHES = (
    *("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ASSETS_CACHE", "HF_XET_CACHE"),
    *("TRANSFORMERS_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
    *("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT", "HF_HUB_DISABLE_XET", "HF_HUB_ENABLE_HF_TRANSFER"),
)
"""Variables of the Hugging Face libraries, without HF_TOKEN, which is a secret."""

PROXIES = (
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""How the network is reached from here."""

HUB_VARIABLES = (*CACHES, *PROXIES)
