"""Application of stored deltas to the tensors of a version.

    tensors of version 13 ──delta 14──▶ 14 ──delta 15──▶ 15     `DeltaApplier.tensors`
    buffers of version 12 ──▶ BufferPool ──▶ memory of changed tensors

The tensors that the path starts from are never written: other threads generate with them. Tensors
that a delta of the same path made are changed in place.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from storage.errors import CorruptError
from storage.formats.safetensors import Digest, digest
from storage.formats.safetensors import num_bytes as bytes_of
from storage.machine.cpus import num_cpus
from storage.records.weights import FileInfo, HostTensor, TensorInfo
from storage.store.ordered_map import ordered_map
from storage.weights.codec import deltas
from storage.weights.codec.delta_numpy import Bits
from storage.weights.delta_store import blob_of

GROWTH_MAX = 4
"""All tensors of a version together, by name, have at most this many times the bytes of those that
were stored whole and that they go back to. A short manifest could name one tensor many times, or
any number of changes of it; so could each manifest of a chain.
"""


class BufferPool:
    """Buffers of tensors that are no longer used, by dtype and shape. Safe in many threads."""

    def __init__(self, tensors: Iterable[HostTensor], in_use: Iterable[HostTensor] = ()) -> None:
        """Take the buffers of `tensors`, except those that `in_use` share.

        Read-only buffers, such as views into a file's bytes, are left out.
        """
        taken = {_address(tensor.bits) for tensor in in_use}
        self._free: dict[tuple[str, tuple[int, ...]], list[Bits]] = defaultdict(list)
        for tensor in tensors:
            bits = tensor.bits
            owns_memory = bits.flags.writeable and bits.flags.c_contiguous and bits.base is None
            if owns_memory and _address(bits) not in taken:
                taken.add(_address(bits))
                self._free[tensor.dtype, tensor.shape].append(bits)

    def take(self, like: HostTensor) -> Bits | None:
        """Return a buffer for a tensor like this one; None where the pool has none."""
        with suppress(IndexError):  # other threads take buffers too
            return self._free[like.dtype, like.shape].pop()
        return None


@dataclass(frozen=True)
class _Entry:
    """One entry of a delta's files."""

    file: str
    name: str
    tensor: str
    """The first tensor that is made of it; tied tensors share the entry."""


class DeltaApplier:
    """The tensors of a version, to which deltas are applied one after the other.

    Owns the tensors that it makes, the buffers that it may write to, and the digests known so far.
    """

    def __init__(
        self,
        start: Mapping[str, HostTensor],
        start_digests: Mapping[str, str],
        spare: Iterable[HostTensor] = (),
        whole_bytes: int = 0,
    ) -> None:
        """Begin with the tensors `start`, whose digests are verified; their bits stay as they are.

        Args:
            spare: tensors that are no longer used. Their buffers are written to, except those
                that `start` shares.
            whole_bytes: `LoadedWeights.whole_bytes` of `start`.
        """
        self.tensors: Mapping[str, HostTensor] = dict(start)
        self.whole_bytes = whole_bytes or _num_bytes(start.values())
        self._start = frozenset(start.values())
        self._digests = {tensor: start_digests[name] for name, tensor in start.items()}
        self._pool = BufferPool(spare, in_use=self._start)

    def clear(self) -> None:
        """Drop the tensors: what is applied next is an anchor."""
        self.tensors, self.whole_bytes = {}, 0

    def apply(
        self,
        place: str,
        infos: Mapping[str, TensorInfo],
        files: Iterable[tuple[FileInfo, Mapping[str, HostTensor]]],
        *,
        with_digests: bool,
    ) -> None:
        """Apply one delta: replace the tensors by those that `infos` list.

        Unchanged tensors are shared with the base, unless they are views into a file's bytes.
        Whether the base was the right one is shown by the digests of the result alone.

        Args:
            place: folder of the delta, for error messages.
            files: the files with their entries, read one at a time.
            with_digests: compute the digests of changed tensors while their bits are in the cache.

        Raises:
            CorruptError: the delta does not fit the tensors; these are lost then.
        """
        base, threads = self.tensors, num_cpus()
        entries = _entries(infos)
        check_growth(place, infos, self.whole_bytes)
        sources = {
            name: _source(place, info, base)
            for name, info in infos.items()
            if info.source or not info.file
        }
        writable = self._writable(sources, entries)

        def make(work: tuple[_Entry, HostTensor | None]) -> tuple[_Entry, HostTensor, str]:
            entry, stored = work
            where = f"{place}/{entry.file}"
            if stored is None:
                raise CorruptError(f"{where} does not hold a tensor that its manifest lists")
            if entry.tensor not in sources:
                return entry, _whole(where, stored, infos[entry.tensor]), ""
            source, made_digest = sources[entry.tensor], Digest() if with_digests else None
            in_place = source in writable
            try:
                tensor = deltas.apply(
                    source,
                    blob_of(stored),
                    in_place=in_place,
                    into=None if in_place else self._pool.take(source),
                    digest=made_digest,
                )
            except CorruptError as error:
                raise CorruptError(f"{where}, the change of {entry.tensor}: {error}") from error
            return entry, tensor, str(made_digest) if made_digest else ""

        made: dict[_Entry, HostTensor] = {}
        stored_entries = _stored_entries(entries.values(), files)
        with ordered_map(make, stored_entries, threads=threads, budget=2 * threads) as results:
            for entry, tensor, made_digest in results:
                made[entry] = tensor
                self._digests.pop(tensor, None)  # of the bits before, where changed in place
                if made_digest:
                    self._digests[tensor] = made_digest
        self.whole_bytes += _num_bytes(made[entry] for entry in made if entry.tensor not in sources)
        unchanged = {
            source: _with_own_memory(source)
            for name, source in sources.items()
            if name not in entries
        }
        self.tensors = {
            name: made[entries[name]] if name in entries else unchanged[sources[name]]
            for name in infos
        }

    def digests(self) -> dict[str, str]:
        """Return the digest of every tensor by name; a known one is not computed again."""
        missing = {tensor for tensor in self.tensors.values() if tensor not in self._digests}
        with ThreadPoolExecutor(num_cpus()) as pool:
            self._digests |= zip(missing, pool.map(digest, missing), strict=True)
        return {name: self._digests[tensor] for name, tensor in self.tensors.items()}

    def _writable(
        self, sources: Mapping[str, HostTensor], entries: Mapping[str, _Entry]
    ) -> set[HostTensor]:
        """Tensors that were made here and that a single tensor of the next version comes from."""
        uses = Counter(
            source
            for name, source in sources.items()
            if name not in entries or entries[name].tensor == name
        )
        return {tensor for tensor, count in uses.items() if count == 1} - self._start


def _entries(infos: Mapping[str, TensorInfo]) -> dict[str, _Entry]:
    """The entry of every tensor that has one, by the tensor's name."""
    first: dict[tuple[str, str], _Entry] = {}
    return {
        name: first.setdefault(
            (info.file, info.entry or name), _Entry(info.file, info.entry or name, name)
        )
        for name, info in infos.items()
        if info.file
    }


def _stored_entries(
    entries: Collection[_Entry], files: Iterable[tuple[FileInfo, Mapping[str, HostTensor]]]
) -> Iterator[tuple[_Entry, HostTensor | None]]:
    """Each entry once, with what its file holds, in the order of the files."""
    by_file: dict[str, list[_Entry]] = defaultdict(list)
    for entry in dict.fromkeys(entries):
        by_file[entry.file].append(entry)
    for file, contents in files:
        for entry in by_file[file.name]:
            yield entry, contents.get(entry.name)


def check_growth(place: str, infos: Mapping[str, TensorInfo], whole_bytes: int) -> None:
    """Check the sizes that a delta or an anchor claims, before a tensor is made.

    Args:
        whole_bytes: of the tensors that its base goes back to; 0 for an anchor.

    Raises:
        CorruptError: it has more than `GROWTH_MAX` times the bytes that are stored.
    """
    entries = _entries(infos)
    is_whole = {name: bool(info.file and not info.source) for name, info in infos.items()}
    wholes = {entries[name].tensor for name in infos if is_whole[name]}
    # Of an adapter whose step changed nothing, all B with the same shape share one entry.
    stored_bytes = whole_bytes + sum(bytes_of(infos[name]) for name in wholes)
    for of_whole, stored in ((True, stored_bytes), (False, whole_bytes)):
        claimed = sum(bytes_of(info) for name, info in infos.items() if is_whole[name] is of_whole)
        if claimed > GROWTH_MAX * stored:
            raise CorruptError(
                f"{place} has {claimed} bytes of tensors that go back to {stored} "
                f"stored ones: more than {GROWTH_MAX} times as many"
            )


def _source(place: str, info: TensorInfo, base: Mapping[str, HostTensor]) -> HostTensor:
    source = base.get(info.source)
    if source is None or (source.dtype, source.shape) != (info.dtype, info.shape):
        raise CorruptError(
            f"{place} needs the tensor {info.source!r}, {info.dtype} {list(info.shape)}, which its "
            "base lacks"
        )
    return source


def _whole(where: str, stored: HostTensor, info: TensorInfo) -> HostTensor:
    if (stored.dtype, stored.shape) != (info.dtype, info.shape):
        raise CorruptError(
            f"{where} holds a tensor of another form than its manifest lists: {stored.dtype} "
            f"{stored.shape}"
        )
    return stored


def _with_own_memory(tensor: HostTensor) -> HostTensor:
    """The tensor itself, or a copy of a view, which would keep a whole file in memory."""
    if tensor.bits.base is None:
        return tensor
    return HostTensor(tensor.dtype, tensor.shape, tensor.bits.copy())


def _num_bytes(tensors: Iterable[HostTensor]) -> int:
    """Bytes of the tensors; those that share their buffer count once."""
    return sum(
        {_address(each.bits): each.bits.nbytes for each in tensors if each.bits.size}.values()
    )


def _address(bits: Bits) -> int:
    """Where the array's memory begins: tensors with the same address share their buffer."""
    return int(bits.ctypes.data)
