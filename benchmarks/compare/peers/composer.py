"""MosaicML Composer: only named, because no release of it installs beside the torch we use."""

import composer  # noqa: F401  # where it is there, its rows say that nobody wrote its functions

PACKAGE = "mosaicml"
