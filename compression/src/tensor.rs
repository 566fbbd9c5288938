//! One tensor compressed by itself, without ranks or a training: what a rank alone in its job would send, in one message that says
//! everything its reader needs.
//!
//! Layout, little endian: magic `FXT1`; length of the spec's text, u32, and the text; seed, step, u64 each; learning rate, f64;
//! type of the tensor's elements, u8 ([`Kind`]); number of dimensions, u8, and the dimensions, u64 each; number of rounds, u8;
//! per round the length of its message, u64, and the message (`FORMAT.md`, version 2).

use crate::codec::{EncodeError, ReadError, Shape, Travels};
use crate::pipeline::{Gradient, Member, Outcome, Pipeline, Step};
use crate::wire::{Reader, Writer};
use crate::{Layers, MAX_VALUES};
use flexcomm_domain::spec::{CompressorSpec, SpecError};

const MAGIC: [u8; 4] = *b"FXT1";

/// Most dimensions of a tensor.
pub const MAX_DIMENSIONS: usize = 32;

/// Type of a tensor's elements before it was compressed. Compressing takes f32 values; a reader may go back to this.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of binary32.
    Bf16,
    /// IEEE 754 binary64.
    F64,
}

impl Kind {
    const ALL: [Self; 4] = [Self::F32, Self::F16, Self::Bf16, Self::F64];

    /// As NumPy and torch call it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
            Self::F64 => "float64",
        }
    }

    /// The type of a name.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// What is compressed: dimensions and type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorShape {
    dimensions: Vec<u64>,
    kind: Kind,
}

/// Failed to compress or restore a tensor.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TensorError {
    /// More values or dimensions than a message can have.
    #[error("compress a tensor of shape {0:?}: allowed are {MAX_DIMENSIONS} dimensions and 2^32 - 1 values")]
    Shape(Vec<u64>),
    /// Refused by the compressor.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// Bytes that are no message of a tensor.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A message whose text names no compressor.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// A message for another decoder.
    #[error("decompress a message of {of}: this decompressor is of {here}")]
    Another {
        /// Spec and shape of the message.
        of: String,
        /// Of the decoder.
        here: String,
    },
}

impl TensorShape {
    /// Checks dimensions.
    ///
    /// # Errors
    /// [`TensorError::Shape`].
    pub fn new(dimensions: Vec<u64>, kind: Kind) -> Result<Self, TensorError> {
        let values = dimensions.iter().try_fold(1u64, |product, d| product.checked_mul(*d));
        match values.filter(|n| *n <= MAX_VALUES as u64 && dimensions.len() <= MAX_DIMENSIONS) {
            Some(_) => Ok(Self { dimensions, kind }),
            None => Err(TensorError::Shape(dimensions)),
        }
    }

    /// How long it is in each dimension.
    pub fn dimensions(&self) -> &[u64] {
        &self.dimensions
    }

    /// Type of its elements.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Number of values.
    pub fn values(&self) -> usize {
        self.dimensions.iter().product::<u64>() as usize
    }

    /// As a matrix: the first dimension by all others.
    fn layers(&self) -> Layers {
        let (n, rows) = (self.values(), self.dimensions.first().copied().unwrap_or(1).max(1) as usize);
        let shape = if n == 0 { Shape::vector(0) } else { Shape { rows, cols: n / rows } };
        Layers::matrices(&[shape]).unwrap_or_else(|_| unreachable!("new() bounds the number of values"))
    }
}

/// A compressed tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorMessage {
    spec: CompressorSpec,
    shape: TensorShape,
    seed: u64,
    step: Step,
    rounds: Vec<Vec<u8>>,
}

impl TensorMessage {
    /// What made it.
    pub fn spec(&self) -> &CompressorSpec {
        &self.spec
    }

    /// What it was made of.
    pub fn shape(&self) -> &TensorShape {
        &self.shape
    }

    /// Which of its compressor's messages this is, from 0.
    pub fn step(&self) -> u64 {
        self.step.index
    }

    /// Bytes that ranks would exchange: the messages of all rounds, without what names spec and shape here.
    pub fn wire_bytes(&self) -> usize {
        self.rounds.iter().map(Vec::len).sum()
    }

    /// As bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Writer::new();
        let text = self.spec.to_string();
        out.raw(&MAGIC);
        out.u32(text.len() as u32);
        out.raw(text.as_bytes());
        out.u64(self.seed);
        out.u64(self.step.index);
        out.f64(self.step.learning_rate);
        out.u8(self.shape.kind as u8);
        out.u8(self.shape.dimensions.len() as u8);
        self.shape.dimensions.iter().for_each(|d| out.u64(*d));
        out.u8(self.rounds.len() as u8);
        for round in &self.rounds {
            out.u64(round.len() as u64);
            out.raw(round);
        }
        out.into_vec()
    }

    /// Reads what [`Self::to_bytes`] wrote.
    ///
    /// # Errors
    /// [`TensorError::Read`] and [`TensorError::Spec`] for any other bytes. What the rounds say is read by [`Decoder::decode`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, TensorError> {
        let mut from = Reader::new(bytes);
        let magic = from.take("magic", 4)?;
        if magic != MAGIC {
            let value = magic.iter().fold(0, |value, byte| value << 8 | u64::from(*byte));
            return Err(ReadError::field("magic", value, "this is no message of a tensor").into());
        }
        let length = u64::from(from.u32("length of the spec")?);
        let spec = String::from_utf8_lossy(from.items("spec", length, 1)?).parse()?;
        let (seed, index, learning_rate) = (from.u64("seed")?, from.u64("step")?, from.f64("learning rate")?);
        if !(learning_rate.is_finite() && learning_rate > 0.0) {
            let rule = "it must be finite and above 0";
            return Err(ReadError::number("learning rate", learning_rate, rule).into());
        }
        let code = from.u8("type of elements")?;
        let kind = Kind::ALL.get(usize::from(code)).copied();
        let rule = "it must be 0 to 3";
        let kind = kind.ok_or(ReadError::field("type of elements", code, rule))?;
        let dimensions =
            (0..from.u8("number of dimensions")?).map(|_| from.u64("dimension")).collect::<Result<_, _>>()?;
        let shape = TensorShape::new(dimensions, kind)?;
        let mut rounds = Vec::new();
        for _ in 0..from.u8("number of rounds")? {
            let length = from.u64("length of a round")?;
            rounds.push(from.items("round", length, 1)?.to_vec());
        }
        from.finish()?;
        Ok(Self { spec, shape, seed, step: Step { index, learning_rate }, rounds })
    }
}

/// Compresses tensors of one shape, one after the other, with the memory, momentum and warm start of its spec.
#[derive(Debug)]
pub struct Encoder {
    pipeline: Pipeline,
    shape: TensorShape,
    seed: u64,
    next: u64,
}

impl Encoder {
    /// With nothing remembered.
    pub fn new(spec: &CompressorSpec, shape: TensorShape, seed: u64) -> Self {
        Self { pipeline: Pipeline::new(spec, shape.layers(), Member::alone(seed)), shape, seed, next: 0 }
    }

    /// All rounds of one tensor. On a refusal nothing has changed.
    ///
    /// # Errors
    /// [`TensorError::Encode`].
    pub fn encode(&mut self, values: &[f32], learning_rate: f64) -> Result<(TensorMessage, Outcome), TensorError> {
        let step = Step { index: self.next, learning_rate };
        let mut message = Writer::new();
        let mut outcome = self.pipeline.compress(Gradient::F32(values), step, &mut message)?;
        let mut rounds = vec![message.bytes().to_vec()];
        while outcome.more {
            let sum = message.bytes().to_vec();
            outcome = self.pipeline.advance(&sum, &mut message)?;
            rounds.push(message.bytes().to_vec());
        }
        self.next += 1;
        let spec = *self.pipeline.spec();
        let made = TensorMessage { spec, shape: self.shape.clone(), seed: self.seed, step, rounds };
        // What it learns from the mean of all ranks, which is its own.
        if matches!(self.pipeline.travels(), Travels::Sums(_)) {
            let mut mean = vec![0.0; values.len()];
            let last = made.rounds.last().map_or(&[][..], Vec::as_slice);
            self.pipeline.mean(last, step.index, &mut mean)?;
        }
        outcome.energy = self.pipeline.counted(outcome.energy);
        Ok((made, outcome))
    }

    /// What error feedback keeps for the next tensor, in units of gradients; empty when nothing can be.
    pub fn residual(&self) -> Vec<f32> {
        self.pipeline.residual()
    }
}

/// Restores tensors of one spec, shape and seed. Compressors that learn from what was exchanged (`gradiveq`) need
/// every message of an [`Encoder`], in order; of all others any message can be restored by a fresh one.
#[derive(Debug)]
pub struct Decoder {
    pipeline: Pipeline,
    shape: TensorShape,
    seed: u64,
}

impl Decoder {
    /// For messages like this one.
    pub fn of(message: &TensorMessage) -> Self {
        let (spec, shape) = (&message.spec, message.shape.clone());
        let pipeline = Pipeline::new(spec, shape.layers(), Member::alone(message.seed));
        Self { pipeline, shape, seed: message.seed }
    }

    /// Replaces `out` by what a message means: C(x), in units of gradients.
    ///
    /// # Errors
    /// [`TensorError::Another`], [`TensorError::Read`].
    pub fn decode(&mut self, message: &TensorMessage, out: &mut [f32]) -> Result<(), TensorError> {
        let name = |spec: &CompressorSpec, shape: &TensorShape, seed| {
            format!("{spec} for the shape {:?} and the seed {seed}", shape.dimensions)
        };
        let here = name(self.pipeline.spec(), &self.shape, self.seed);
        let of = name(&message.spec, &message.shape, message.seed);
        if of != here {
            return Err(TensorError::Another { of, here });
        }
        let Some((last, before)) = message.rounds.split_last() else {
            return Err(ReadError::NoMessages.into());
        };
        self.pipeline.decode_rounds(before, last, message.step, out)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods;
    use proptest::prelude::{any, prop, prop_assert, proptest};

    fn shape(dimensions: &[u64]) -> TensorShape {
        TensorShape::new(dimensions.to_vec(), Kind::F32).unwrap()
    }

    /// Gradients that change a little from step to step.
    fn gradient(n: usize, step: u64) -> Vec<f32> {
        (0..n).map(|i| ((i * 37 % 101) as f32 - 50.0) / 17.0 + (step as f32 * 0.1 + i as f32).sin()).collect()
    }

    fn specs() -> impl Iterator<Item = String> {
        let named = methods::all().flat_map(|e| e.examples.iter().map(|args| format!("{}({args})", e.info.name)));
        named.flat_map(|text| [text.clone(), format!("{text}+ef(vanilla)"), format!("{text}+ef(efsign)")])
    }

    /// What is restored and what is kept make up what came in.
    #[test]
    fn every_compressor_is_restored_from_its_bytes() {
        for text in specs() {
            let spec: CompressorSpec = text.parse().unwrap();
            let (mut encoder, mut decoder) = (Encoder::new(&spec, shape(&[12, 5, 2]), 7), None);
            let mut residual = vec![0.0; 120];
            for step in 0..3 {
                let x = gradient(120, step);
                let (message, outcome) = encoder.encode(&x, 0.5).unwrap_or_else(|e| panic!("{text}: failed to {e}"));
                let read = TensorMessage::from_bytes(&message.to_bytes()).unwrap();
                assert_eq!(read, message, "{text}");
                let mut out = vec![f32::NAN; 120];
                decoder.get_or_insert_with(|| Decoder::of(&read)).decode(&read, &mut out).unwrap();
                assert!(out.iter().all(|v| v.is_finite()), "{text}: {out:?}");
                if !text.starts_with("gradiveq") {
                    let mut alone = vec![0.0; 120];
                    Decoder::of(&read).decode(&read, &mut alone).unwrap();
                    assert_eq!(out, alone, "{text} by a fresh decoder, step {step}");
                }
                if text.ends_with("+ef(vanilla)") {
                    let kept = encoder.residual();
                    for (i, ((x, before), (out, after))) in
                        x.iter().zip(&residual).zip(out.iter().zip(&kept)).enumerate()
                    {
                        let (came, went) = (x + before, out + after);
                        assert!((came - went).abs() <= 1e-4 * came.abs().max(1.0), "{text} at {i}: {came} is {went}");
                    }
                    residual = kept;
                }
                assert!(outcome.energy.gain().is_finite(), "{text}");
            }
        }
    }

    #[test]
    fn messages_of_other_compressors_and_shapes_are_refused() {
        let message = |text: &str, dimensions: &[u64]| {
            let shape = shape(dimensions);
            let x = gradient(shape.values(), 0);
            Encoder::new(&text.parse().unwrap(), shape, 1).encode(&x, 1.0).unwrap().0
        };
        let first = message("topk(k=2)", &[4, 2]);
        for other in
            [message("topk(k=3)", &[4, 2]), message("topk(k=2)", &[2, 4]), message("topk(k=2)+ef(vanilla)", &[4, 2])]
        {
            let error = Decoder::of(&first).decode(&other, &mut [0.0; 8]).unwrap_err();
            assert!(matches!(&error, TensorError::Another { .. }), "{error}");
        }
        assert!(Decoder::of(&first).decode(&first, &mut [0.0; 7]).is_err());
        assert!(TensorShape::new(vec![1 << 20, 1 << 20], Kind::F32).is_err());
        assert!(TensorShape::new(vec![1; 33], Kind::F32).is_err());
        assert_eq!(message("topk(k=2)", &[]).shape().values(), 1, "a scalar");
        assert!(message("topk(k=2)", &[3, 0]).wire_bytes() > 0, "an empty tensor");
    }

    proptest! {
        /// Any bytes are survived, and what is read and decoded was not torn.
        #[test]
        fn broken_bytes_are_refused(cut in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(), bit in 0u8..8) {
            for text in ["topk(k=0.1)+ef(vanilla)", "powersgd(rank=2)", "qsgd(s=4,coding=delta)"] {
                let (message, _) =
                    Encoder::new(&text.parse().unwrap(), shape(&[8, 6]), 3).encode(&gradient(48, 0), 1.0).unwrap();
                let whole = message.to_bytes();
                prop_assert!(TensorMessage::from_bytes(&whole[..cut.index(whole.len())]).is_err());
                let mut flipped = whole.clone();
                flipped[at.index(whole.len())] ^= 1 << bit;
                let Ok(read) = TensorMessage::from_bytes(&flipped) else { continue };
                if read.shape().values() <= 1 << 20 {
                    let mut out = vec![0.0; read.shape().values()];
                    let _ = Decoder::of(&read).decode(&read, &mut out);
                }
            }
        }
    }
}
