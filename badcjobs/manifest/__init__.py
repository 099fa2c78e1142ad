"""SOURCE arguments → chunks: BADC manifests, folders and lists, read as a stream and cut into shards."""

from badcjobs.manifest.audio_header import read_duration_s
from badcjobs.manifest.cutting import AS_IT_COMES, Cutting
from badcjobs.manifest.remarks import Remarks
from badcjobs.manifest.shards import WHOLE, Shard, parse_shard
from badcjobs.manifest.sources import Sources, open_sources

__all__ = [
    "AS_IT_COMES", "WHOLE", "Cutting", "Remarks", "Shard", "Sources", "open_sources", "parse_shard", "read_duration_s",
]  # fmt: skip
