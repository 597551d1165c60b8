"""XXH3, the digest of all that checkpoints hold; who imports it needs its package only then."""

from typing import Any

from trainkit.basics.packages import require

__all__ = ["xxh3_64_hexdigest", "xxh3_128", "xxh3_128_hexdigest"]

try:
    from xxhash import xxh3_64_hexdigest, xxh3_128, xxh3_128_hexdigest
except ModuleNotFoundError:

    def xxh3_128(*_: Any) -> Any:  # type: ignore[no-redef]
        """Raise ConfigError: there is no digest, and no checkpoint, without `xxhash`."""
        require("xxhash", "A digest of parameters or states")

    xxh3_64_hexdigest = xxh3_128_hexdigest = xxh3_128  # type: ignore[assignment]
