//! Saving and restoring a pipeline, exactly.

use super::Pipeline;
use crate::codec::ReadError;
use crate::memory::Units;
use crate::wire::{Reader, Writer};

const MAGIC: &[u8; 4] = b"FXCS";
const VERSION: u8 = 1;

/// Failed to restore a pipeline. It is then empty of memory, as if new.
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
}

impl Pipeline {
    /// Replaces `out` by everything that outlives a step: momentum, memory, codecs' states, the counter of skipped
    /// gradients. A step that was begun and needs more rounds is not part of it.
    pub fn save(&self, out: &mut Writer) {
        out.clear();
        out.raw(MAGIC);
        out.u8(VERSION);
        let text = self.strategy.to_string();
        out.u32(text.len() as u32);
        out.raw(text.as_bytes());
        out.u64(self.layers.values() as u64);
        out.u64(self.skipped);
        out.u64(self.leftover.len() as u64);
        out.f32s(&self.leftover);
        self.leftover_units.save(out);
        out.f64(self.learning_rate);
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

    /// Puts a saved state back, bit for bit. The strategy must be the same and the layers as long.
    pub fn restore(&mut self, saved: &[u8]) -> Result<(), StateError> {
        let result = self.read_state(saved);
        if result.is_err() {
            let fresh = Self::new(&self.strategy, self.layers.clone(), self.member).with_kernel(self.kernel);
            *self = fresh;
        }
        result
    }

    fn read_state(&mut self, saved: &[u8]) -> Result<(), StateError> {
        let mut from = Reader::new(saved);
        let head = from.take("magic", 4)?;
        let version = from.u8("version")?;
        if head != MAGIC || version != VERSION {
            let rule = "not a state of version 1";
            return Err(ReadError::Field { what: "version", value: u64::from(version), rule }.into());
        }
        let length = u64::from(from.u32("length of the strategy")?);
        let saved = String::from_utf8_lossy(from.items("strategy", length, 1)?).into_owned();
        let here = self.strategy.to_string();
        if saved != here {
            return Err(StateError::Strategy { saved, here });
        }
        let (expected, got) = (self.layers.values() as u64, from.u64("n")?);
        if expected != got {
            return Err(ReadError::Length { expected, got }.into());
        }
        self.open = None;
        self.skipped = from.u64("skipped")?;
        self.read_leftover(&mut from)?;
        self.learning_rate = from.f64("learning rate")?;
        if self.learning_rate <= 0.0 {
            let value = self.learning_rate;
            return Err(ReadError::Number { what: "learning rate", value, rule: "it must be above 0" }.into());
        }
        if let Some(momentum) = &mut self.momentum {
            momentum.restore(&mut from)?;
        }
        if let Some(memory) = &mut self.memory {
            memory.restore(&mut from)?;
        }
        for unit in &mut self.units {
            unit.codec.restore(&mut from)?;
        }
        Ok(from.finish()?)
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
