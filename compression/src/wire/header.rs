//! Version 2 of the message: a header that names method, parameters and length, then the tensors' payloads.

use super::checksum::crc32c;
use super::{Reader, Writer};
use crate::codec::{ReadError, Scope};
use crate::{Layers, MAX_VALUES};
use flexcomm_domain::spec::{Checksum, MAX_PARAMETERS, ValueType};

/// What every message begins with.
const MAGIC: [u8; 4] = *b"FXCG";

/// Version of the messages; earlier builds had another.
pub const VERSION: u8 = 2;

/// Bytes of the fixed part; the parameters follow, 8 bytes each.
pub const HEADER_BYTES: usize = 32;

/// Bytes of a header with so many parameters.
pub const fn header_bytes(parameters: usize) -> usize {
    HEADER_BYTES + 8 * parameters
}

mod at {
    pub(super) const LENGTH: usize = 16;
    pub(super) const CHECKSUM: usize = 28;
}

mod flag {
    pub(super) const CRC32C: u8 = 1;
    pub(super) const FACTORS: u8 = 2;
    /// Place of the two bits of a [`super::ValueType`].
    pub(super) const VALUES: u8 = 2;
}

/// Type of the gradient's values before compression; what a receiver makes of the decoded f32 values is its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum DType {
    /// IEEE 754 binary32.
    #[default]
    F32 = 1,
    /// IEEE 754 binary16.
    F16 = 2,
    /// The upper half of binary32.
    Bf16 = 3,
}

/// What all ranks must have in common for a message to mean the same to them. Two bytes: they tell a receiver that is out
/// of step, not one that is malicious.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Common {
    /// What counts as one tensor.
    pub scope: Scope,
    /// The step's number modulo 64.
    pub step: u8,
    /// A byte drawn by seed, step and tensor: other seeds show in all but one of 256 messages.
    pub draw: u8,
}

impl Common {
    const SAID: u8 = 0x80;
    const PER_TENSOR: u8 = 0x40;

    fn bytes(common: Option<Self>) -> [u8; 2] {
        common.map_or([0; 2], |Self { scope, step, draw }| {
            let scope = if scope == Scope::Tensor { Self::PER_TENSOR } else { 0 };
            [Self::SAID | scope | step & 0x3f, draw]
        })
    }

    fn read([first, draw]: [u8; 2]) -> Result<Option<Self>, ReadError> {
        if first & Self::SAID == 0 {
            let value = u64::from(first | draw);
            return if value == 0 { Ok(None) } else { field("scope and step", value, "bit 7 of the first, or both 0") };
        }
        let scope = if first & Self::PER_TENSOR != 0 { Scope::Tensor } else { Scope::Bucket };
        Ok(Some(Self { scope, step: first & 0x3f, draw }))
    }
}

/// What a message says about itself.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Header {
    /// Code of the method, see [`crate::entry::Entry::code`].
    pub method: u8,
    /// Type of the gradient.
    pub dtype: DType,
    /// Which exchange of the step.
    pub round: u8,
    /// Values of the whole gradient.
    pub n: u64,
    /// How many of `parameters` count.
    pub count: usize,
    /// In the order of the method's table.
    pub parameters: [f64; MAX_PARAMETERS],
    /// Whether it can be checked.
    pub checksum: Checksum,
    /// Whether the payload begins with an f32 per tensor that the tensor is to be multiplied by.
    pub factors: bool,
    /// How selected values are written.
    pub value_type: ValueType,
    /// None: the sender did not say.
    pub common: Option<Common>,
}

impl Header {
    /// Bytes in front of the payload.
    pub const fn bytes(&self) -> usize {
        header_bytes(self.count)
    }

    /// The parameters that count.
    pub fn values(&self) -> &[f64] {
        &self.parameters[..self.count.min(MAX_PARAMETERS)]
    }
}

/// Of a message, without the field that holds it.
fn checksum(message: &[u8]) -> u32 {
    crc32c(&[&message[..at::CHECKSUM], &message[HEADER_BYTES..]])
}

/// Replaces `out` by a message whose payload `write` appends.
pub fn write_message<E>(
    header: &Header,
    out: &mut Writer,
    write: impl FnOnce(&mut Writer) -> Result<E, crate::codec::EncodeError>,
) -> Result<E, crate::codec::EncodeError> {
    out.clear();
    out.raw(&MAGIC);
    let codes = [VERSION, header.method, header.dtype as u8, header.count as u8];
    out.raw(&codes);
    out.u64(header.n);
    out.u64(0);
    let [first, second] = Common::bytes(header.common);
    let checked = if header.checksum == Checksum::Crc32c { flag::CRC32C } else { 0 };
    let factors = if header.factors { flag::FACTORS } else { 0 };
    let flags = checked | factors | (header.value_type as u8) << flag::VALUES;
    out.raw(&[flags, header.round, first, second, 0, 0, 0, 0]);
    header.values().iter().for_each(|value| out.f64(*value));
    let result = write(out)?;
    let payload = (out.len() - header.bytes()) as u64;
    out.set(at::LENGTH, &payload.to_le_bytes());
    if header.checksum == Checksum::Crc32c {
        let sum = checksum(out.bytes());
        out.set(at::CHECKSUM, &sum.to_le_bytes());
    }
    Ok(result)
}

/// Length of the message that begins here, as its header says; none where there is no header.
pub fn message_length(bytes: &[u8]) -> Option<usize> {
    let Claims { header, length, .. } = read_header(&mut Reader::new(bytes)).ok()?;
    header.bytes().checked_add(usize::try_from(length).ok()?)
}

/// A message whose header is checked; its payload is the codec's to check.
#[derive(Debug, Clone, Copy)]
pub struct Envelope<'a> {
    /// What it says about itself.
    pub header: Header,
    /// The tensors' payloads, one after the other.
    pub payload: &'a [u8],
}

impl<'a> Envelope<'a> {
    /// Checks header, length and checksum.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, ReadError> {
        let mut from = Reader::new(bytes);
        let Claims { header, length, checksum } = read_header(&mut from)?;
        if from.left() as u64 != length {
            let left = from.left();
            return Err(match usize::try_from(length) {
                Ok(length) if length < left => ReadError::Trailing(left - length),
                _ => ReadError::End { what: "payload", wanted: length, left },
            });
        }
        if header.checksum == Checksum::Crc32c {
            let got = self::checksum(bytes);
            if got != checksum {
                return Err(ReadError::Checksum { expected: checksum, got });
            }
        }
        let payload = from.take("payload", from.left())?;
        Ok(Self { header, payload })
    }

    /// Whether it is for a gradient of these layers.
    pub fn check_length(&self, layers: &Layers) -> Result<(), ReadError> {
        let expected = layers.values() as u64;
        if self.header.n == expected { Ok(()) } else { Err(ReadError::Length { expected, got: self.header.n }) }
    }
}

fn field<T>(what: &'static str, value: u64, rule: &'static str) -> Result<T, ReadError> {
    Err(ReadError::field(what, value, rule))
}

/// What a message says of itself, before it is checked.
struct Claims {
    header: Header,
    /// Of the payload, in bytes.
    length: u64,
    checksum: u32,
}

fn read_header(from: &mut Reader<'_>) -> Result<Claims, ReadError> {
    let magic = from.take("magic", 4)?;
    if magic != MAGIC {
        return field("magic", u64::from(u32::from_le_bytes([magic[0], magic[1], magic[2], magic[3]])), "not FXCG");
    }
    let version = from.u8("version")?;
    if version != VERSION {
        return field(
            "version",
            u64::from(version),
            "this reader knows version 2; version 1 is of earlier builds, and all ranks need one release",
        );
    }
    let method = from.u8("method")?;
    let dtype = match from.u8("dtype")? {
        1 => DType::F32,
        2 => DType::F16,
        3 => DType::Bf16,
        other => return field("dtype", u64::from(other), "1 f32, 2 f16, 3 bf16"),
    };
    let count = usize::from(from.u8("number of parameters")?);
    if count > MAX_PARAMETERS {
        return field("number of parameters", count as u64, "at most 12");
    }
    let n = from.u64("n")?;
    if n > MAX_VALUES as u64 {
        return field("n", n, "at most 2^32 - 1");
    }
    let length = from.u64("length of the payload")?;
    let flags = from.u8("flags")?;
    let value_type = match flags >> flag::VALUES {
        0 => ValueType::F32,
        1 => ValueType::Bf16,
        2 => ValueType::Int8,
        _ => return field("flags", u64::from(flags), "1 CRC-32C, 2 factors, 4 values in bfloat16, 8 in 8 bits"),
    };
    let checksum = if flags & flag::CRC32C == 0 { Checksum::None } else { Checksum::Crc32c };
    let factors = flags & flag::FACTORS != 0;
    let round = from.u8("round")?;
    let common = Common::read([from.u8("scope and step")?, from.u8("draw")?])?;
    let sum = from.u32("checksum")?;
    if checksum == Checksum::None && sum != 0 {
        return field("checksum", u64::from(sum), "0 without a checksum");
    }
    let mut parameters = [0.0; MAX_PARAMETERS];
    for value in &mut parameters[..count] {
        *value = from.f64("parameter")?;
    }
    let header = Header { method, dtype, round, n, count, parameters, checksum, factors, value_type, common };
    Ok(Claims { header, length, checksum: sum })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn message(header: &Header, payload: &[u8]) -> Vec<u8> {
        let mut out = Writer::from_vec(vec![1, 2, 3]);
        write_message(header, &mut out, |out| {
            out.raw(payload);
            Ok(())
        })
        .unwrap();
        out.into_vec()
    }

    fn header(parameters: &[f64], checksum: Checksum) -> Header {
        let mut all = [0.0; MAX_PARAMETERS];
        all[..parameters.len()].copy_from_slice(parameters);
        let count = parameters.len();
        let (common, factors) = (None, count % 2 == 1);
        let value_type = [ValueType::F32, ValueType::Bf16, ValueType::Int8][count % 3];
        Header {
            method: 7,
            dtype: DType::Bf16,
            round: 1,
            n: 99,
            count,
            parameters: all,
            checksum,
            factors,
            value_type,
            common,
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            parameters in prop::collection::vec(-1e9f64..1e9, 0..=MAX_PARAMETERS),
            payload in prop::collection::vec(any::<u8>(), 0..100),
            sum: bool,
            at: prop::sample::Index,
            bit in 0u8..8,
            common in prop::option::of((prop::sample::select(&[Scope::Bucket, Scope::Tensor][..]), 0u8..64, any::<u8>())),
        ) {
            let common = common.map(|(scope, step, draw)| Common { scope, step, draw });
            let header = Header { common, ..header(&parameters, if sum { Checksum::Crc32c } else { Checksum::None }) };
            let bytes = message(&header, &payload);
            let read = Envelope::parse(&bytes).unwrap();
            prop_assert_eq!((read.header, read.payload), (header, &payload[..]));
            for end in 0..bytes.len() {
                prop_assert!(Envelope::parse(&bytes[..end]).is_err());
            }
            let mut changed = bytes.clone();
            changed[at.index(bytes.len())] ^= 1 << bit;
            prop_assert!(!sum || Envelope::parse(&changed).is_err());
            let mut longer = bytes.clone();
            longer.push(0);
            prop_assert_eq!(Envelope::parse(&longer).unwrap_err(), ReadError::Trailing(1));
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..120)) {
            let with: Vec<u8> = [b"FXCG\x02".as_slice(), &bytes].concat();
            let _ = Envelope::parse(&bytes);
            let _ = Envelope::parse(&with);
        }
    }
}
