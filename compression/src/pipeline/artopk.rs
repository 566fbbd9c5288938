//! AR-Topk (Tyagi and Swany 2023, Algorithm 1) around any compressor that selects values: one rank's indices go to all ranks, then
//! everybody's values at these indices add up in flight.
//!
//! A step: every rank calls [`Pipeline::select`]; the leader broadcasts what [`Pipeline::write_indices`] writes, a message of round
//! [`INDICES`] whose payload is k (4 bytes) and a set of k indices; all ranks call [`Pipeline::agree`] on it and
//! [`Pipeline::take`] their values, f32, which an allreduce sums; [`Pipeline::scatter`] makes the mean of the sums.

use super::{Gradient, Open, Pipeline, Step};
use crate::codec::{Context, EncodeError, ReadError, Size};
use crate::wire::{Reader, Writer, all_finite, index_bytes, read_indices, write_indices, write_message};
use crate::{Energy, kernels};

/// Round of the message of indices. Compressors that select values have one round of their own, 0.
pub(super) const INDICES: u32 = 1;

impl Pipeline {
    /// Error feedback, and where this rank may lead its selection. Nothing counts as sent before [`Self::take`]. Answers the
    /// energies of the selection (0 without one) and of the compensated gradient.
    pub fn select(&mut self, gradient: Gradient<'_>, step: Step, may_lead: bool) -> Result<Energy, EncodeError> {
        self.open_step(gradient, step, |own, gradient, open| own.choose(gradient, open, may_lead))
    }

    fn choose(&mut self, gradient: Gradient<'_>, open: Open, may_lead: bool) -> Result<Energy, EncodeError> {
        self.pass_mark();
        let n = self.layers.values();
        gradient.check_length(n)?;
        self.feed(gradient, open.step)?;
        let context = self.context(open.step.index, 0);
        let Self { units, compensated, seen, selected, .. } = self;
        selected.reset(n);
        for (unit, stats) in units.iter_mut().zip(seen.iter()).filter(|_| may_lead) {
            let context = Context { tensor: unit.tensor, known: Some(*stats), ..context };
            let Some(own) = unit.codec.select(&compensated[unit.range.clone()], &context)? else {
                return Err(EncodeError::NoSelection(self.spec.compressor().name));
            };
            let first = unit.range.start as u32;
            selected.indices.extend(own.indices().iter().map(|index| first + index));
            selected.values.extend_from_slice(own.values());
        }
        self.open = Some(open);
        let compensated = seen.iter().map(|stats| stats.energy).sum();
        Ok(Energy { sent: selected.energy(), compensated })
    }

    /// Replaces `out` by the message of the indices that this rank selected.
    pub fn write_indices(&mut self, out: &mut Writer) -> Result<(), EncodeError> {
        let open = self.open.ok_or(EncodeError::Round { asked: INDICES, next: 0, rounds: INDICES })?;
        self.frame(self.selected.indices(), &open, out)
    }

    /// As [`Self::write_indices`], of indices that a device has selected, ascending and below n.
    pub fn frame_indices(&self, indices: &[u32], step: Step, out: &mut Writer) -> Result<(), EncodeError> {
        self.frame(indices, &Open { step, ..Open::first() }, out)
    }

    fn frame(&self, indices: &[u32], open: &Open, out: &mut Writer) -> Result<(), EncodeError> {
        write_message(&self.header(open, INDICES), out, |out| {
            out.u32(indices.len() as u32);
            write_indices(indices, self.layers.values(), out);
            Ok(())
        })
    }

    /// Bytes of the longest message of indices.
    pub fn indices_size(&self) -> usize {
        let most = self.units.iter().map(|unit| unit.codec.most_selected()).sum();
        // Sets grow with k but for the rounding of their parts.
        let rounding = usize::from(matches!(self.size(), Size::AtMost(_)));
        self.header(&Open::first(), INDICES).bytes() + 4 + index_bytes(self.layers.values(), most) + rounding
    }

    /// Reads the leader's message; answers how many indices all ranks have agreed on.
    pub fn agree(&mut self, message: &[u8], step: u64) -> Result<usize, ReadError> {
        self.agreed.clear();
        let mut from = Reader::new(self.open_message(message, step, INDICES)?);
        let k = from.u32("number of indices")? as usize;
        read_indices(&mut from, self.layers.values(), k, &mut self.agreed)?;
        from.finish()?;
        Ok(k)
    }

    /// Replaces `values` by this rank's at the indices of [`Self::agree`]: they count as sent, and the memory moves on. Needs a
    /// gradient from [`Self::select`].
    pub fn take(&mut self, values: &mut Vec<f32>) -> Result<Energy, EncodeError> {
        let Some(open) = self.open.take() else {
            return Err(EncodeError::Round { asked: INDICES, next: 0, rounds: INDICES });
        };
        let Self { compensated, agreed, .. } = self;
        values.clear();
        values.extend(agreed.iter().map(|index| compensated[*index as usize]));
        agreed.iter().for_each(|index| compensated[*index as usize] = 0.0);
        let energy =
            Energy { sent: kernels::energy(values), compensated: self.seen.iter().map(|stats| stats.energy).sum() };
        self.settle(open);
        Ok(energy)
    }

    /// Indices that this rank has selected, ascending.
    pub fn selected(&self) -> &[u32] {
        self.selected.indices()
    }

    /// Indices that all ranks have agreed on, ascending.
    pub fn agreed(&self) -> &[u32] {
        &self.agreed
    }

    /// Replaces `out` by the mean: of the sums over all ranks at the agreed indices, zero elsewhere.
    pub fn scatter(&self, sums: &[f32], out: &mut [f32]) -> Result<(), ReadError> {
        self.check_output(out)?;
        let (expected, got) = (self.agreed.len() as u64, sums.len() as u64);
        if expected != got {
            return Err(ReadError::Length { expected, got });
        }
        all_finite("sum", sums)?;
        out.fill(0.0);
        let world = self.member.world.max(1) as f32;
        self.agreed.iter().zip(sums).for_each(|(index, sum)| out[*index as usize] = sum / world);
        self.to_gradients(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Layers;
    use crate::pipeline::Member;

    const LENGTHS: [usize; 2] = [90, 30];

    fn ranks(spec: &str, world: u32) -> Vec<Pipeline> {
        let member = |rank| Member { rank, world, ..Member::alone(3) };
        let layers = || Layers::new(&LENGTHS).unwrap();
        (0..world).map(|rank| Pipeline::new(&spec.parse().unwrap(), layers(), member(rank))).collect()
    }

    /// Whole numbers, so that sums are exact.
    fn gradient(rank: u64, step: u64) -> Vec<f32> {
        (0..120).map(|i| ((i * 37 + rank * 59 + step * 101) % 97) as f32 - 48.0).collect()
    }

    /// One step led by `leader`; answers the mean.
    fn step(ranks: &mut [Pipeline], index: u64, leader: usize) -> Vec<f32> {
        let at = Step { index, learning_rate: 0.1 };
        for (rank, own) in (0..).zip(ranks.iter_mut()) {
            own.select(Gradient::F32(&gradient(rank, index)), at, rank == leader as u64).unwrap();
        }
        let mut message = Writer::new();
        ranks[leader].write_indices(&mut message).unwrap();
        assert!(message.len() <= ranks[leader].indices_size());
        let mut sums = Vec::new();
        for own in ranks.iter_mut() {
            let k = own.agree(message.bytes(), index).unwrap();
            let mut values = Vec::new();
            own.take(&mut values).unwrap();
            assert_eq!(values.len(), k);
            sums.resize(k, 0.0f32);
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        }
        let mut means = vec![vec![7.0; 120]; ranks.len()];
        ranks.iter().zip(&mut means).for_each(|(own, mean)| own.scatter(&sums, mean).unwrap());
        assert!(means.iter().all(|mean| *mean == means[0]));
        means.swap_remove(0)
    }

    #[test]
    fn what_is_sent_and_the_residual_add_up_for_every_compressor_that_selects() {
        for spec in [
            "topk(k=0.1)+ef(vanilla)",
            "lwtopk(k=0.1)+ef(vanilla)",
            "mstopk(k=0.1)+ef(vanilla)",
            "dgc(k=0.1)+ef(vanilla)",
            "threshold(v=20)+ef(vanilla)",
        ] {
            let mut own = ranks(spec, 2);
            let (mut given, mut sent) = (vec![0.0; 120], vec![0.0; 120]);
            for index in 0..6 {
                (0..2).for_each(|rank| given.iter_mut().zip(gradient(rank, index)).for_each(|(sum, g)| *sum += g));
                let mean = step(&mut own, index, index as usize % 2);
                assert!(mean.iter().any(|value| *value != 0.0), "{spec}");
                sent.iter_mut().zip(mean).for_each(|(sum, mean)| *sum += 2.0 * mean);
            }
            own.iter().for_each(|own| sent.iter_mut().zip(own.residual()).for_each(|(sum, residual)| *sum += residual));
            assert_eq!(sent, given, "{spec}");
        }
    }

    #[test]
    fn the_leaders_indices_are_those_that_it_would_send() {
        let mut own = ranks("topk(k=0.1)", 1);
        let mean = step(&mut own, 0, 0);
        let (mut alone, mut message, mut sent) = (ranks("topk(k=0.1)", 1), Writer::new(), vec![0.0; 120]);
        let at = Step { index: 0, learning_rate: 0.1 };
        alone[0].compress(Gradient::F32(&gradient(0, 0)), at, &mut message).unwrap();
        alone[0].aggregate(&[message.bytes()], 0, &mut sent).unwrap();
        assert_eq!(mean, sent);
        // That message is none of indices.
        let refused = own[0].agree(message.bytes(), 0).unwrap_err().to_string();
        assert!(refused.contains("round"), "{refused}");
    }

    #[test]
    fn a_step_that_was_taken_goes_back_bit_for_bit() {
        let mut own = ranks("topk(k=0.1)+ef(vanilla)", 1);
        step(&mut own, 0, 0);
        let before = own[0].residual();
        own[0].mark();
        step(&mut own, 1, 0);
        assert_ne!(own[0].residual(), before);
        own[0].undo().unwrap();
        assert_eq!(own[0].residual(), before);
        own[0].take(&mut Vec::new()).unwrap_err();
    }

    /// Of the registry, with every example.
    #[test]
    fn what_may_travel_so_chooses_values() {
        for entry in crate::methods::all() {
            for arguments in entry.examples {
                let spec: flexcomm_domain::spec::CompressorSpec =
                    format!("{}({arguments})", entry.info.name).parse().unwrap();
                let mut own = Pipeline::new(&spec, Layers::new(&LENGTHS).unwrap(), Member::alone(3));
                let at = Step { index: 0, learning_rate: 0.1 };
                let chooses = own.select(Gradient::F32(&gradient(0, 0)), at, true).is_ok();
                assert!(chooses || !spec.selects(), "{spec}");
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let mut own = ranks("qsgd(s=4)", 1);
        let at = Step { index: 0, learning_rate: 0.1 };
        let gradient = gradient(0, 0);
        let refused = own[0].select(Gradient::F32(&gradient), at, true).unwrap_err().to_string();
        assert!(refused.contains("qsgd") && refused.contains("selects values"), "{refused}");
        own[0].select(Gradient::F32(&gradient), at, false).unwrap();
        let mut own = ranks("topk(k=0.1)+ef(vanilla)", 1);
        own[0].select(Gradient::F32(&gradient), at, true).unwrap();
        let mut message = Writer::new();
        own[0].write_indices(&mut message).unwrap();
        for end in 0..message.len() {
            assert!(own[0].agree(&message.bytes()[..end], 0).is_err());
        }
        let refused = own[0].agree(message.bytes(), 1).unwrap_err().to_string();
        assert!(refused.contains("step"), "of another step: {refused}");
        own[0].agree(message.bytes(), 0).unwrap();
        assert!(own[0].scatter(&[0.0; 11], &mut [0.0; 120]).is_err());
        assert!(own[0].scatter(&[f32::INFINITY; 12], &mut [0.0; 120]).is_err());
    }
}
