"""Where a data set can be had: plain descriptions, so that the registry needs no network code."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Download:
    """A file on a web server; an archive is unpacked and then removed."""

    url: str
    """Where it is."""
    md5: str
    """Its published digest."""
    folder: str
    """Folder below the data folder that receives it; of an archive, the one that it holds."""

    @property
    def filename(self) -> str:
        return self.url.rsplit("/", 1)[-1]


@dataclass(frozen=True, kw_only=True)
class HubDownload:
    """The parquet files of a data set on the Hugging Face hub."""

    repository: str
    """`owner/name` there."""
    folder: str
    """Folder below the data folder that receives them."""
