"""What one user is shown: the pages over a source, those of them that are live, and the actions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.web.actions import Actions
from kfp_gpuquota.web.live import Live
from kfp_gpuquota.web.pages import Pages

if TYPE_CHECKING:
    from kfp_gpuquota.web.site_config import SiteConfig
    from kfp_gpuquota.web.source import Source


class UserSite:
    """The parts of the site that depend on who looks. Users who see the same share one."""

    def __init__(self, source: Source, site: SiteConfig) -> None:
        self.source = source
        self.live = Live(source)
        self.pages = Pages(source, site)
        self.actions = Actions(source, site)
