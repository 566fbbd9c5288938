//! Saving and restoring a pipeline, exactly.

use super::Pipeline;
use crate::codec::{ReadError, Shape};
use crate::memory::Units;
use crate::wire::{Reader, Writer};

const MAGIC: &[u8; 4] = b"FXCS";
const VERSION: u8 = 3;

/// Read too: without the byte that says whether a rate is assumed, which was a rate of its own.
const BEFORE: u8 = 2;
const ASSUMED_BEFORE: f64 = 1.0 + f64::EPSILON;

/// Failed to restore a pipeline. It is as it was.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum StateError {
    /// Not readable.
    #[error("restore a saved state: failed to {0}")]
    Read(#[from] ReadError),
    /// Saved with another strategy.
    #[error("restore a saved state of strategy {saved:?}: {here:?} is in force")]
    Strategy {
        /// Its text.
        saved: String,
        /// Ours.
        here: String,
    },
    /// Of another model, or of one cut into other buckets.
    #[error("restore a saved state of {saved} layers: there are {here} here")]
    Layers {
        /// How many it has.
        saved: u32,
        /// How many we have.
        here: u32,
    },
    /// A layer of another shape.
    #[error("restore a saved state whose layer {layer} is {}: here it is {}", matrix(.saved), matrix(.here))]
    Layer {
        /// The first that differs, from 0.
        layer: u32,
        /// Values per column and per row.
        saved: [u64; 2],
        /// Ours.
        here: [u64; 2],
    },
    /// Nothing to go back to.
    #[error("undo a step: no place was marked, or more than one step came after it")]
    NoMark,
    /// Drawn by another seed: ranks would draw different numbers, and a run would not go on as it was.
    #[error("restore a saved state of seed {saved}: here it is seed {here}")]
    Seed {
        /// Its seed.
        saved: u64,
        /// Ours.
        here: u64,
    },
}

fn matrix([rows, cols]: &[u64; 2]) -> String {
    format!("{rows} x {cols}")
}

impl Pipeline {
    /// Replaces `out` by everything that outlives a step: momentum, memory, codecs' states, the counter of skipped
    /// gradients, the last step's index and rate; and by what these belong to: strategy, layers, seed. A step that was begun
    /// and needs more rounds is not part of it. Nor is the rank: the residual may go on elsewhere.
    pub fn save(&self, out: &mut Writer) {
        out.clear();
        self.save_head(out);
        out.u8(u8::from(self.last.is_some()));
        self.last.iter().for_each(|step| out.u64(*step));
        out.u64(self.skipped);
        out.u64(self.leftover.len() as u64);
        out.f32s(&self.leftover);
        self.leftover_units.save(out);
        out.f64(self.learning_rate);
        out.u8(u8::from(self.rate_assumed));
        if let Some(momentum) = &self.momentum {
            momentum.save(out);
        }
        if let Some(memory) = &self.memory {
            memory.save(out);
        }
        for unit in &self.units {
            unit.codec.save(out);
        }
    }

    fn save_head(&self, out: &mut Writer) {
        out.raw(MAGIC);
        out.u8(VERSION);
        let text = self.spec.to_string();
        out.u32(text.len() as u32);
        out.raw(text.as_bytes());
        out.u32(self.layers.len() as u32);
        for shape in self.layers.shapes() {
            sides(shape).into_iter().for_each(|side| out.u64(side));
        }
        out.u64(self.seed());
    }

    /// Puts a saved state back, bit for bit. Strategy, layers and seed must be the same.
    pub fn restore(&mut self, saved: &[u8]) -> Result<(), StateError> {
        let mut from = Reader::new(saved);
        self.check_head(&mut from)?;
        let version = saved[4];
        let mut read = Self::new(&self.spec, self.layers.clone(), self.member).with_kernel(self.kernel);
        read.read_state(&mut from, version)?;
        *self = read;
        Ok(())
    }

    fn check_head(&self, from: &mut Reader<'_>) -> Result<(), StateError> {
        let head = from.take("magic", 4)?;
        let version = from.u8("version")?;
        if head != MAGIC || !(BEFORE..=VERSION).contains(&version) {
            let rule = "not a state of version 2 or 3, and no other is read";
            return Err(ReadError::field("version", version, rule).into());
        }
        let length = u64::from(from.u32("length of the strategy")?);
        let saved = String::from_utf8_lossy(from.items("strategy", length, 1)?).into_owned();
        let here = self.spec.to_string();
        if saved != here {
            return Err(StateError::Strategy { saved, here });
        }
        self.check_layers(from)?;
        let (saved, here) = (from.u64("seed")?, self.seed());
        if saved == here { Ok(()) } else { Err(StateError::Seed { saved, here }) }
    }

    fn check_layers(&self, from: &mut Reader<'_>) -> Result<(), StateError> {
        let (saved, here) = (from.u32("number of layers")?, self.layers.len() as u32);
        if saved != here {
            return Err(StateError::Layers { saved, here });
        }
        for (layer, here) in (0..).zip(self.layers.shapes().map(sides)) {
            let saved = [from.u64("rows of a layer")?, from.u64("columns of a layer")?];
            if saved != here {
                return Err(StateError::Layer { layer, saved, here });
            }
        }
        Ok(())
    }

    fn read_state(&mut self, from: &mut Reader<'_>, version: u8) -> Result<(), ReadError> {
        let done = from.flag("whether a step was done")?;
        self.last = if done { Some(from.u64("last step")?) } else { None };
        self.skipped = from.u64("skipped")?;
        self.read_leftover(from)?;
        self.learning_rate = from.f64("learning rate")?;
        if self.learning_rate <= 0.0 {
            return Err(ReadError::number("learning rate", self.learning_rate, "it must be above 0"));
        }
        self.rate_assumed = match version {
            BEFORE => self.learning_rate == ASSUMED_BEFORE,
            _ => from.flag("whether the rate is assumed")?,
        };
        if let Some(momentum) = &mut self.momentum {
            momentum.restore(from)?;
        }
        if let Some(memory) = &mut self.memory {
            memory.restore(from)?;
        }
        for unit in &mut self.units {
            unit.codec.restore(from)?;
        }
        from.finish()
    }

    fn read_leftover(&mut self, from: &mut Reader<'_>) -> Result<(), ReadError> {
        let (n, got) = (self.layers.values(), from.u64("length of what is left over")?);
        if got != 0 && got != n as u64 {
            return Err(ReadError::Length { expected: n as u64, got });
        }
        self.leftover.clear();
        self.leftover.extend(from.f32s("value left over", got as usize)?);
        self.leftover_units = Units::restore(from)?;
        Ok(())
    }
}

fn sides(shape: Shape) -> [u64; 2] {
    [shape.rows as u64, shape.cols as u64]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Layers;
    use crate::pipeline::{Gradient, Member, Step};

    fn rank() -> Pipeline {
        let spec = "topk(k=0.5)+ef(vanilla)".parse().unwrap();
        Pipeline::new(&spec, Layers::fused(4).unwrap(), Member::alone(1))
    }

    /// As version 2 had it: without the byte behind the learning rate.
    fn before(own: &Pipeline) -> Vec<u8> {
        let mut out = Writer::new();
        own.save_head(&mut out);
        let (step, skipped, leftover, units, rate) = (1 + 8 * usize::from(own.last.is_some()), 8, 8, 16, 8);
        let at = out.len() + step + skipped + leftover + units + rate;
        own.save(&mut out);
        let mut bytes = out.into_vec();
        assert_eq!(bytes.remove(at), u8::from(own.rate_assumed));
        bytes[4] = BEFORE;
        bytes
    }

    #[test]
    fn states_of_version_2_go_on_with_a_rate_and_without() {
        for rate in [0.25, 0.0] {
            let mut own = rank();
            let known = own.known_rate(rate);
            let step = |index, learning_rate| Step { index, learning_rate };
            own.compress(Gradient::F32(&[4.0, 3.0, 2.0, 1.0]), step(0, known), &mut Writer::new()).unwrap();
            if rate == 0.0 {
                own.rebase(ASSUMED_BEFORE);
            }
            let mut read = rank();
            read.restore(&before(&own)).unwrap();
            assert_eq!((read.rate_is_assumed(), read.residual()), (rate == 0.0, own.residual()));
            // The first rate above 0 rescales nothing; a rate that falls to half doubles.
            let next = read.known_rate(0.125);
            read.compress(Gradient::F32(&[9.0, 9.0, 0.0, 0.0]), step(1, next), &mut Writer::new()).unwrap();
            assert_eq!(read.residual(), if rate == 0.0 { [0.0, 0.0, 2.0, 1.0] } else { [0.0, 0.0, 4.0, 2.0] });
        }
    }
}
