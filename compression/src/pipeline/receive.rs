//! Messages that arrive.

use super::artopk::INDICES;
use super::scale::read_factors;
use super::{Pipeline, Step};
use crate::Build;
use crate::codec::{Context, ReadError, Target, Travels};
use crate::wire::{Common, Envelope, Reader, all_finite};

impl Pipeline {
    /// Replaces `out` by the gradient that one message means: Q^-1, in units of gradients at the learning rate of the last
    /// step. Of a codec with several rounds, the last round's.
    pub fn decompress(&mut self, message: &[u8], step: u64, out: &mut [f32]) -> Result<(), ReadError> {
        self.decode(message, step, (1.0, out))
    }

    /// Replaces `out` by what a lone rank's step means, from its messages of all rounds; `step` is the sender's.
    pub(crate) fn decode_rounds(
        &mut self,
        before: &[Vec<u8>],
        last: &[u8],
        step: Step,
        out: &mut [f32],
    ) -> Result<(), ReadError> {
        self.rebase(step.learning_rate);
        for (round, sum) in before.iter().enumerate() {
            self.reply(sum, step.index, round as u32)?;
        }
        match self.travels() {
            Travels::Sums(_) => self.mean(last, step.index, out),
            Travels::Gathers => self.decompress(last, step.index, out),
        }
    }

    /// Replaces `out` by the mean that the sum of all ranks' messages means (Algorithm 1, lines 8 and 9), and lets codecs
    /// with a warm start see it.
    pub fn mean(&mut self, sum: &[u8], step: u64, out: &mut [f32]) -> Result<(), ReadError> {
        let scale = 1.0 / self.member.world.max(1) as f32;
        self.decode(sum, step, (scale, out))?;
        if self.units.iter().any(|unit| unit.codec.wants_reply()) {
            self.reply(sum, step, self.rounds() - 1)?;
        }
        Ok(())
    }

    /// Replaces `out` by what the ranks' messages mean together (Agg; lines 11 to 13): the mean, or what the method
    /// defines. Give every rank the same order and all get the same bits.
    pub fn aggregate(&mut self, messages: &[&[u8]], step: u64, out: &mut [f32]) -> Result<(), ReadError> {
        if messages.is_empty() {
            return Err(ReadError::NoMessages);
        }
        self.check_output(out)?;
        let mut readers = emptied(std::mem::take(&mut self.readers));
        let result = self.aggregate_into(messages, step, (&mut readers, out));
        self.readers = emptied(readers);
        result
    }

    fn aggregate_into<'a>(
        &mut self,
        messages: &[&'a [u8]],
        step: u64,
        (readers, out): (&mut Vec<Reader<'a>>, &mut [f32]),
    ) -> Result<(), ReadError> {
        let scaled = self.is_scaled();
        self.factors.clear();
        for message in messages {
            let mut from = Reader::new(self.open_message(message, step, self.rounds() - 1)?);
            if scaled {
                read_factors(&mut from, self.units.len(), &mut self.factors)?;
            }
            readers.push(from);
        }
        let context = self.context(step, self.rounds() - 1);
        let (share, tensors) = (1.0 / messages.len() as f32, self.units.len());
        for (i, unit) in self.units.iter_mut().enumerate() {
            let context = Context { tensor: unit.tensor, ..context };
            let out = &mut out[unit.range.clone()];
            if !scaled {
                unit.codec.aggregate(readers, &context, out)?;
                continue;
            }
            let factors = self.factors.iter().skip(i).step_by(tensors);
            for (rank, (from, factor)) in readers.iter_mut().zip(factors).enumerate() {
                let target = Target { scale: share * factor, out: &mut *out, fresh: rank == 0 };
                unit.codec.decode(from, &context, target)?;
            }
        }
        self.to_gradients(out)?;
        readers.iter().try_for_each(|reader| reader.finish())
    }

    /// Gives codecs the sum of a round's messages.
    pub(super) fn reply(&mut self, sum: &[u8], step: u64, round: u32) -> Result<(), ReadError> {
        let mut from = Reader::new(self.open_message(sum, step, round)?);
        let (scale, context) = (1.0 / self.member.world.max(1) as f32, self.context(step, round));
        for unit in &mut self.units {
            unit.codec.reply(&mut from, &Context { tensor: unit.tensor, ..context }, scale)?;
        }
        from.finish()
    }

    fn decode(&mut self, message: &[u8], step: u64, (scale, out): (f32, &mut [f32])) -> Result<(), ReadError> {
        self.check_output(out)?;
        let mut from = Reader::new(self.open_message(message, step, self.rounds() - 1)?);
        let context = self.context(step, self.rounds() - 1);
        self.factors.clear();
        match self.is_scaled() {
            true => read_factors(&mut from, self.units.len(), &mut self.factors)?,
            false => self.factors.resize(self.units.len(), 1.0),
        }
        for (unit, factor) in self.units.iter_mut().zip(&self.factors) {
            let context = Context { tensor: unit.tensor, ..context };
            let target = Target::replace(scale * factor, &mut out[unit.range.clone()]);
            unit.codec.decode(&mut from, &context, target)?;
        }
        self.to_gradients(out)?;
        from.finish()
    }

    /// From the units of what was sent; a value that only then leaves f32's range is refused.
    pub(super) fn to_gradients(&self, out: &mut [f32]) -> Result<(), ReadError> {
        let unit = self.unit();
        if unit == 1.0 {
            return Ok(());
        }
        out.iter_mut().for_each(|value| *value /= unit);
        all_finite("value in units of gradients", out)
    }

    pub(super) fn check_output(&self, out: &[f32]) -> Result<(), ReadError> {
        let (expected, got) = (self.layers.values() as u64, out.len() as u64);
        if expected == got { Ok(()) } else { Err(ReadError::Length { expected, got }) }
    }

    /// The payload of a message of the strategy in force, made in this step.
    pub fn open_message<'a>(&self, message: &'a [u8], step: u64, round: u32) -> Result<&'a [u8], ReadError> {
        let envelope = Envelope::parse(message)?;
        let header = &envelope.header;
        let (expected, got) = (self.spec.entry().code, header.method);
        if expected != got || header.values() != self.spec.values().all() {
            return Err(ReadError::Strategy { expected, got });
        }
        if u32::from(header.round) != round {
            return Err(ReadError::field("round", header.round, "not the one due"));
        }
        if header.value_type != self.spec.value_type() {
            let rule = "another type of values than that of the strategy in force";
            return Err(ReadError::field("type of values", header.value_type as u64, rule));
        }
        if header.factors != self.is_scaled() {
            let rule = "there are such of unbiased quantizers with error feedback, and of no others";
            return Err(ReadError::field("factors", header.factors, rule));
        }
        envelope.check_length(&self.layers)?;
        header.common.map_or(Ok(()), |common| self.check_common(common, (step, round)))?;
        Ok(envelope.payload)
    }

    fn check_common(&self, got: Common, (step, round): (u64, u32)) -> Result<(), ReadError> {
        let here = self.common(step);
        if got.scope != here.scope {
            return Err(ReadError::Scope { expected: here.scope.as_str(), got: got.scope.as_str() });
        }
        match round == INDICES || self.units.iter().any(|unit| unit.codec.draws_together()) {
            true if got.step != here.step => Err(ReadError::Step { expected: step, got: got.step }),
            true if got.draw != here.draw => {
                let Context { seed, tensor, .. } = self.context(step, 0);
                Err(ReadError::Draws { seed, step, tensor })
            }
            _ => Ok(()),
        }
    }

    /// Whether messages add up in flight.
    pub fn travels(&self) -> Travels {
        self.spec.travels()
    }
}

/// The same room for readers of other messages: collecting in place keeps the allocation.
fn emptied<'a>(mut readers: Vec<Reader<'_>>) -> Vec<Reader<'a>> {
    readers.clear();
    readers.into_iter().map(|_| Reader::new(&[])).collect()
}
