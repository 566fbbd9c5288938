//! How the values that a selection keeps are written: as they are, or rounded to fewer bits. What rounding takes off stays in
//! the residual of error feedback, as what is not selected does.

use crate::codec::ReadError;
use crate::wire::{Reader, Writer, bf16_to_f32, f32_to_bf16, finite};
use flexcomm_domain::spec::ValueType;

/// Values per step of [`ValueType::Int8`].
const BLOCK: usize = ValueType::BLOCK as usize;

/// Largest value that is rounded; larger ones become it, so that no rounding makes infinity.
const MOST: f32 = 3.38e38;

/// Multiples of the step that a byte holds, on either side of 0.
const LEVELS: f32 = 127.0;

/// Appends values, which become what a receiver reads.
pub(super) fn write(values: &mut [f32], value_type: ValueType, out: &mut Writer) {
    match value_type {
        ValueType::F32 => out.f32s(values),
        ValueType::Bf16 => values.chunks_mut(BLOCK).for_each(|block| write_bf16(block, out)),
        ValueType::Int8 => values.chunks_mut(BLOCK).for_each(|block| write_int8(block, out)),
    }
}

fn write_bf16(values: &mut [f32], out: &mut Writer) {
    let mut halves = [0u16; BLOCK];
    let halves = &mut halves[..values.len()];
    values.iter_mut().for_each(|value| *value = value.clamp(-MOST, MOST));
    f32_to_bf16(values, halves);
    bf16_to_f32(halves, values);
    let room = out.room(2 * halves.len()).as_chunks_mut::<2>().0;
    room.iter_mut().zip(halves).for_each(|(to, half)| *to = half.to_le_bytes());
}

/// A step, f32, and a signed byte each: the multiple of the step that is nearest.
fn write_int8(values: &mut [f32], out: &mut Writer) {
    let most = values.iter().fold(0.0f32, |most, value| most.max(value.abs())).min(MOST);
    let step = most / LEVELS;
    out.f32(step);
    let room = out.room(values.len());
    for (value, byte) in values.iter_mut().zip(room) {
        let level = if step > 0.0 { (*value / step).round_ties_even().clamp(-LEVELS, LEVELS) } else { 0.0 };
        *byte = (level as i8).to_le_bytes()[0];
        *value = level * step;
    }
}

/// Adds `scale` times k values to `out` at the indices.
pub(super) fn add(
    from: &mut Reader<'_>,
    (indices, value_type): (&[u32], ValueType),
    (scale, out): (f32, &mut [f32]),
) -> Result<(), ReadError> {
    let mut put = |index: u32, value: f32| out[index as usize] += scale * value;
    match value_type {
        ValueType::F32 => {
            indices.iter().zip(from.f32s("value", indices.len())?).for_each(|(index, value)| put(*index, value));
        }
        ValueType::Bf16 => {
            for index in indices {
                let half = from.take("value", 2)?;
                let value = f32::from_bits(u32::from(u16::from_le_bytes([half[0], half[1]])) << 16);
                put(*index, finite("value", value)?);
            }
        }
        ValueType::Int8 => {
            for block in indices.chunks(BLOCK) {
                let step = from.scale("step of the values")?;
                if step > MOST / LEVELS {
                    return Err(ReadError::number("step of the values", step, "127 of it are no f32"));
                }
                for (index, byte) in block.iter().zip(from.take("value", block.len())?) {
                    put(*index, f32::from(i8::from_le_bytes([*byte])) * step);
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_value() -> impl Strategy<Value = f32> {
        prop_oneof![
            any::<f32>().prop_filter("finite", |value| value.is_finite()),
            -1.0f32..1.0,
            Just(0.0),
            Just(f32::MAX),
            Just(f32::from_bits(1))
        ]
    }

    proptest! {
        #[test]
        fn what_is_written_is_what_the_sender_takes_off(values in prop::collection::vec(any_value(), 0..600)) {
            for value_type in [ValueType::F32, ValueType::Bf16, ValueType::Int8] {
                let (mut sent, mut out) = (values.clone(), Writer::new());
                write(&mut sent, value_type, &mut out);
                prop_assert_eq!(out.len() as u64, value_type.bytes(values.len() as u64));
                let (indices, mut read) = ((0..values.len() as u32).collect::<Vec<_>>(), vec![0.0; values.len()]);
                let mut from = Reader::new(out.bytes());
                add(&mut from, (&indices, value_type), (1.0, &mut read)).unwrap();
                prop_assert_eq!((&read, from.left()), (&sent, 0));
                for end in 0..out.len().min(40) {
                    let cut = &mut Reader::new(&out.bytes()[..end]);
                    prop_assert!(add(cut, (&indices, value_type), (1.0, &mut read)).is_err());
                }
                for (block, rounded) in values.chunks(BLOCK).zip(sent.chunks(BLOCK)) {
                    let most = block.iter().fold(0.0f32, |most, value| most.max(value.abs()));
                    for (value, sent) in block.iter().zip(rounded) {
                        let (off, whole) = (f64::from(*value) - f64::from(*sent), f64::from(value.abs()));
                        let allowed = match value_type {
                            ValueType::F32 => 0.0,
                            // The clamp to MOST takes half a percent of the largest numbers.
                            ValueType::Bf16 => whole / 128.0 + 1e-40,
                            ValueType::Int8 if most > MOST => f64::from(most) * 0.02,
                            ValueType::Int8 => f64::from(most) * 0.501 / 127.0 + 1e-38,
                        };
                        prop_assert!(off.abs() <= allowed, "{:?}: {} became {}", value_type, value, sent);
                    }
                }
            }
        }

        #[test]
        fn any_bytes_are_refused_or_finite(bytes in prop::collection::vec(any::<u8>(), 0..40), k in 0u32..20) {
            let indices: Vec<u32> = (0..k).collect();
            for value_type in [ValueType::F32, ValueType::Bf16, ValueType::Int8] {
                let mut out = [0.0; 20];
                let read = add(&mut Reader::new(&bytes), (&indices, value_type), (1.0, &mut out));
                prop_assert!(read.is_err() || out.iter().all(|value| value.is_finite()));
            }
        }
    }
}
