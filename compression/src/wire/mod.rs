//! Bytes and bits: what payloads are made of, and the header in front of them. `FORMAT.md` beside this crate's
//! manifest is the specification.

mod bits;
mod bytes;
mod checksum;
mod elias;
mod floats;
mod header;
mod indices;
mod pack;

pub use bits::{BitReader, BitRoom, BitWriter, Window};
pub use bytes::{Reader, Writer};
pub(crate) use bytes::{add_finite, all_finite, finite};
pub use elias::{Code, delta_bits, first_delta, first_gamma, gamma_bits};
pub use flexcomm_domain::spec::IndexCoding;
pub use floats::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
pub use header::{Common, DType, Envelope, HEADER_BYTES, Header, VERSION, header_bytes, message_length, write_message};
pub use indices::{index_bytes, read_indices, write_indices, write_indices_least};
pub use pack::{levels_width, pack, packed_bytes, unpack, unpack_checked};
