"""How transformers' paged cache numbers its memory: the differences between its releases."""

from typing import Any

from agentrl.engines.paged_attention import LayerPages, PageGeometry


class CacheAccess:
    """Reads the library's cache: page tables, page numbering, memory; clears it.

    From 5.18 on all layers share one tensor in which a page id is a block of pages; before, each
    layer has its own tensor and a page id is a page.
    """

    def __init__(self, cache: Any, page_size: int) -> None:
        self._cache = cache
        self._page_size = page_size
        self._layers: dict[int, LayerPages] = {}
        self._has_allocators = hasattr(cache, "cache_allocators")

    @property
    def is_born_zero(self) -> bool:
        """Whether the library allocates zeros; `erase` would make the system back all of them."""
        return self._has_allocators

    @property
    def _allocator(self) -> Any:
        if self._has_allocators:
            return next(iter(self._cache.cache_allocators.values()))
        return self._cache.group_cache_managers[0]

    @property
    def page_tables(self) -> dict[str, list[int]]:
        """Page ids of each sequence in the cache."""
        return self._allocator.block_table

    @property
    def geometry(self) -> PageGeometry:
        """How page ids are laid out in memory."""
        return PageGeometry(self._page_size, self._rows_per_page_id, self._layer_pages)

    @property
    def _rows_per_page_id(self) -> int:
        if self._has_allocators:
            return self._allocator.block_physical_stride // self._page_size
        return 1

    def _layer_pages(self, layer: int) -> LayerPages:
        if layer not in self._layers:
            self._layers[layer] = self._view_layer(layer)
        return self._layers[layer]

    def _view_layer(self, layer: int) -> LayerPages:
        if self._has_allocators:
            slots = self._allocator._kv_token_views[layer]
        else:
            _, place = self._cache.layer_index_to_group_indices[layer]
            slots = (self._cache.key_cache[place], self._cache.value_cache[place])
        keys, values = (view.flatten(1) for view in slots)
        pages = (view.view(-1, self._page_size * view.shape[1]) for view in (keys, values))
        return LayerPages(keys, values, *pages)

    def clear(self) -> None:
        """Forget every cached prefix; no sequence may hold pages."""
        if self._has_allocators:
            self._cache.reset()
        else:
            manager = self._cache._block_manager
            self._cache._block_manager = type(manager)(
                manager.num_blocks, manager.block_size, tp_on=manager.tp_on
            )

    def erase(self) -> None:
        """Set the memory to zero: what is masked is still multiplied by zero, and NaN survives."""
        if self._has_allocators:
            self._cache.cache_tensor.zero_()
        else:
            for tensor in (*self._cache.key_cache, *self._cache.value_cache):
                tensor.zero_()
