"""GGUF models in several files."""

from __future__ import annotations

from pathlib import Path

__all__ = ["split"]


def split(path: Path, stem: Path, *, num_parts: int = 2, has_tensors_first: bool = True) -> list[Path]:
    """Write the parts of a model, as `llama-gguf-split` does: only the first one has the metadata. It may have no
    tensors."""
    import gguf

    reader = gguf.GGUFReader(path)
    kinds = gguf.GGUFValueType
    num_holders = num_parts if has_tensors_first else num_parts - 1
    shares = [reader.tensors[number::num_holders] for number in range(num_holders)]
    made = []
    for number, tensors in enumerate(shares if has_tensors_first else [[], *shares]):
        part = stem.with_name(f"{stem.name}-{number + 1:05}-of-{num_parts:05}.gguf")
        writer = gguf.GGUFWriter(part, str(reader.fields["general.architecture"].contents()))
        writer.add_key_value("split.no", number, kinds.UINT16)
        writer.add_key_value("split.count", num_parts, kinds.UINT16)
        writer.add_key_value("split.tensors.count", len(reader.tensors), kinds.INT32)
        for field in reader.fields.values() if number == 0 else ():
            if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                types = field.types
                writer.add_key_value(field.name, field.contents(), types[0], sub_type=types[-1] if types[1:] else None)
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        made.append(part)
    return made
