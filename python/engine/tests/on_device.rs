//! Buckets on a device (the kernels' emulator) and on the host side by side: the same messages, means and memories.

#![allow(clippy::unwrap_used)]

mod lent;

use flexcomm_compression::Compressor;
use flexcomm_compression::{HEADER_BYTES, Method, Part};
use flexcomm_domain::{CompressionRatio, Rank, Strategy};
use flexcomm_engine::{Answers, Bucket, EngineError, OnHost, Param, Ran, Store, kernels, lock};
use flexcomm_gpu_kernels::bucket::{Gradient, Method as Kernels};
use flexcomm_gpu_kernels::{Copies, DType, OUTCOME_BYTES};
use flexcomm_trainer::{Agreement, HEAD_BYTES, Heard, Riding, Status};
use lent::{Emulated, Lent, Memory};

const PARAMS: [Param; 2] = [Param { id: 0, len: 2000, cols: 1 }, Param { id: 1, len: 501, cols: 1 }];
const N: usize = 2501;
const WORLD: u32 = 3;

fn gradient(rank: u64, step: u64) -> Vec<f32> {
    let wave = |i: u64| ((i * 37 + rank * 59 + step * 101) % 997) as f32 / 500.0 - 1.0;
    (0..N as u64).map(|i| wave(i) * wave(i / 3)).collect()
}

fn topk(cr: f64) -> Method {
    Method::new(Compressor::TopK, CompressionRatio::new(cr).unwrap())
}

/// One rank, which may change sides at any step.
struct OneRank {
    rank: u64,
    bucket: Bucket,
    riding: Riding,
}

/// A gradient, and on a device its type.
type Source = (Vec<f32>, Option<DType>);

/// What a rank gives to the allgather, and where its gradient is.
struct Given {
    block: Vec<u8>,
    gradient: Vec<f32>,
    on_device: Option<DType>,
}

impl OneRank {
    fn new(rank: u32) -> Self {
        let strategy: Strategy = "topk@0.1/allgather".parse().unwrap();
        let riding = Riding::new(Agreement::new(Rank(rank), strategy, 0), Rank(rank), WORLD);
        Self { rank: u64::from(rank), bucket: Bucket::new(0, PARAMS.to_vec(), None).unwrap(), riding }
    }

    fn word(&self, status: Status) -> Vec<u8> {
        let mut word = vec![0; self.riding.bytes(0)];
        self.riding.write_bytes(0, N, status, &mut word).unwrap();
        word
    }

    fn settle(&mut self, seed: u64) {
        if !self.bucket.is_resident() {
            let (device, memory) = (Emulated::new(seed).unwrap(), Memory::new(self.bucket.lent_bytes().unwrap()));
            let span = memory.span();
            let home = Lent { device: Emulated::new(seed).unwrap(), _memory: memory };
            self.bucket.reside(&device, (Box::new(home), span)).unwrap();
        }
    }

    fn give(&mut self, step: u64, method: Method, given: Source) -> Given {
        self.riding.begin();
        self.bucket.enter();
        let (gradient, on_device) = given;
        let bytes = self.bucket.message_bytes(method, Part::Whole);
        let seed = step * 3 + self.rank;
        let block = match on_device {
            None => {
                let mut message = vec![0; bytes];
                let status = self.bucket.pack(method, &gradient, seed, &mut message);
                [self.word(status), message].concat()
            }
            Some(dtype) => {
                self.settle(seed);
                let device = Emulated::new(seed).unwrap();
                let source = match dtype {
                    DType::F32 => Memory::of(&gradient),
                    _ => Memory::of(&gradient.iter().map(|x| (x.to_bits() >> 16) as u16).collect::<Vec<_>>()),
                };
                let word = self.word(Status::default());
                let block = Memory::of(&vec![0xeeu8; word.len() + bytes]);
                let at = Gradient { at: source.span(), dtype, weights: (1.0, 1.0) };
                self.bucket.pack_on(&device, (method, seed), at, (block.span(), &word)).unwrap();
                block.bytes()
            }
        };
        Given { block, gradient, on_device }
    }

    fn take(&mut self, method: Method, blocks: &[Vec<u8>], given: Given) -> (Result<Ran, EngineError>, Vec<f32>) {
        let heard = self.riding.hear_bytes(0, N, blocks.iter().map(|b| &b[..HEAD_BYTES])).unwrap();
        let mut out = given.gradient;
        if given.on_device.is_none() {
            let messages: Vec<&[u8]> = blocks.iter().map(|b| &b[HEAD_BYTES..]).collect();
            return (self.bucket.unpack(&heard, method, &messages, &mut out), out);
        }
        let device = Emulated::new(self.rank + 1).unwrap();
        let (all, to) = (Memory::of(&blocks.concat()), Memory::of(&out));
        self.bucket.add_on(&device, (method, WORLD, HEAD_BYTES), (all.span(), to.span())).unwrap();
        let headers: Vec<&[u8]> = blocks.iter().map(|b| &b[HEAD_BYTES..HEAD_BYTES + HEADER_BYTES]).collect();
        let mut outcome = [0; OUTCOME_BYTES as usize];
        device.download(self.bucket.outcome_on_device().unwrap(), &mut outcome).unwrap();
        let ran = self.bucket.judge(Answers { heard: &heard, headers: &headers, outcome: &outcome });
        (ran, to.f32s())
    }

    /// What is held back, wherever it lies, without moving it for good.
    fn held(&mut self, seed: u64) -> Vec<u32> {
        let resident = self.bucket.is_resident();
        self.bucket.come_home().unwrap();
        let held = self.bucket.residual().iter().map(|x| x.to_bits()).collect();
        if resident {
            self.settle(seed);
        }
        held
    }
}

type Step = Vec<(Result<Ran, EngineError>, Vec<f32>)>;

fn step(ranks: &mut [OneRank], index: u64, (method, given): (Method, Vec<Source>)) -> Step {
    let given: Vec<Given> = ranks.iter_mut().zip(given).map(|(rank, given)| rank.give(index, method, given)).collect();
    let blocks: Vec<Vec<u8>> = given.iter().map(|given| given.block.clone()).collect();
    let done = ranks.iter_mut().zip(given).map(|(rank, given)| rank.take(method, &blocks, given)).collect();
    ranks.iter_mut().for_each(|rank| drop(rank.riding.finish()));
    done
}

fn all() -> Vec<OneRank> {
    (0..WORLD).map(OneRank::new).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// One rank stays on the host, one on the device, one changes; k changes, and one gradient is infinite.
#[test]
fn ranks_on_either_side_have_the_bits_of_the_host() {
    if Emulated::new(0).is_none() {
        return;
    }
    let (mut mixed, mut host) = (all(), all());
    for index in 0..8 {
        let method = topk([0.1, 0.01][index as usize / 3 % 2]);
        let changing = (index % 3 != 0).then_some(DType::F32);
        let sides = [None, Some(DType::F32), changing];
        let mut gradients: Vec<Vec<f32>> = (0..3).map(|rank| gradient(rank, index)).collect();
        if index == 4 {
            gradients[1][77] = f32::INFINITY;
        }
        if index == 5 {
            gradients[0][3] = f32::NAN;
        }
        let on = |sides: &[Option<DType>; 3]| gradients.iter().cloned().zip(*sides).collect::<Vec<_>>();
        let got = step(&mut mixed, index, (method, on(&sides)));
        let want = step(&mut host, index, (method, on(&[None; 3])));
        for (rank, ((got, mean), (want, same))) in got.iter().zip(&want).enumerate() {
            let (got, want) = (*got.as_ref().unwrap(), *want.as_ref().unwrap());
            assert_eq!(got, want, "rank {rank}, step {index}");
            assert_eq!(got == Ran::NotFinite, index == 4 || index == 5);
            assert!(got != Ran::Good || bits(mean) == bits(same), "rank {rank}, step {index}");
        }
        for (a, b) in mixed.iter_mut().zip(&mut host) {
            assert_eq!(a.held(index), b.held(index), "rank {}, step {index}", a.rank);
            let [a, b] = [a.bucket.energy(), b.bucket.energy()];
            assert!((a.gain() - b.gain()).abs() < 1e-9, "{a:?} {b:?}");
        }
    }
}

/// The mean goes on from a bf16 gradient and under MSTopk, whose random numbers are each side's own.
#[test]
fn halves_and_mstopk_are_the_same_on_all_ranks() {
    if Emulated::new(0).is_none() {
        return;
    }
    let mut ranks = all();
    let mstopk = Method::new(Compressor::MsTopK, CompressionRatio::new(0.05).unwrap());
    for index in 0..4 {
        let method = if index % 2 == 0 { mstopk } else { topk(0.05) };
        let sides = [Some(DType::Bf16), Some(DType::F32), None];
        let given = (0..3).map(|rank| gradient(rank, index)).zip(sides).collect();
        let done = step(&mut ranks, index, (method, given));
        assert!(done.iter().all(|(ran, _)| matches!(ran, Ok(Ran::Good))), "{done:?}");
        assert!(done.iter().all(|(_, mean)| bits(mean) == bits(&done[0].1)), "step {index}");
        let k = method.kept(&flexcomm_compression::Layers::fused(N).unwrap());
        assert!(ranks[0].held(index).iter().filter(|bits| **bits << 1 == 0).count() >= k);
    }
}

#[test]
fn a_message_that_is_never_judged_or_foreign_does_not_count() {
    let Some(device) = Emulated::new(1) else { return };
    let mut ranks = all();
    let method = topk(0.1);
    let both = |index: u64| (0..3).map(|rank| (gradient(rank, index), Some(DType::F32))).collect::<Vec<_>>();
    step(&mut ranks, 0, (method, both(0)));
    let before = ranks[0].held(0);
    // An exception came between the halves: the next step begins with what was held back before.
    ranks[0].give(1, method, both(1).swap_remove(0));
    ranks[0].riding.finish();
    assert_eq!(ranks[0].held(1), before);
    // A message of another k, as of a rank that runs something else.
    let given: Vec<Given> = ranks.iter_mut().zip(both(2)).map(|(rank, given)| rank.give(2, method, given)).collect();
    let other = given[0].block.clone();
    let mut header = other[HEAD_BYTES..HEAD_BYTES + HEADER_BYTES].to_vec();
    header[16] ^= 1;
    let outcome = [0; OUTCOME_BYTES as usize];
    let good = Heard::default();
    let said = Answers { heard: &good, headers: &[&header], outcome: &outcome };
    let error = ranks[0].bucket.judge(said).unwrap_err().to_string();
    assert!(error.contains("rank 0") && error.contains("another method, n or k"), "{error}");
    assert_eq!(ranks[0].held(2), before);
    let again = ranks[0].bucket.judge(said).unwrap_err().to_string();
    assert!(again.contains("no message was made"), "{again}");
    // Another rank failed: an error here too, and nothing is lost.
    ranks[0].give(3, method, both(3).swap_remove(0));
    let failed = Heard { failed: 1, first_failed: Some(2), ..good };
    let error = ranks[0].bucket.judge(Answers { heard: &failed, headers: &[], outcome: &outcome }).unwrap_err();
    assert!(error.to_string().contains("rank 2 could not do its part"), "{error}");
    assert_eq!(ranks[0].held(3), before);
    // Without memory there, or where a word leaves no room for whole words behind it, the host does it.
    let source = Memory::of(&gradient(0, 4));
    let block = Memory::of(&vec![0u8; 4096]);
    let at = Gradient { at: source.span(), dtype: DType::F32, weights: (1.0, 1.0) };
    let odd = ranks[0].bucket.pack_on(&device, (method, 0), at, (block.span(), &[0; 9])).unwrap_err();
    assert_eq!(odd, OnHost::Place);
    let short = ranks[0].bucket.pack_on(&device, (method, 0), at, (block.span().part(0, 64), &[0; 8])).unwrap_err();
    assert!(short.to_string().contains("failed to launch with the indices of 0 bytes"), "{short}");
    ranks[0].bucket.come_home().unwrap();
    let absent = ranks[0].bucket.pack_on(&device, (method, 0), at, (block.span(), &[0; 8])).unwrap_err();
    assert_eq!(absent, OnHost::Absent);
    assert_eq!(ranks[0].held(4), before);
}

/// One rank of an AR-Topk step, on either side.
struct Turned {
    lists: Memory,
    source: Memory,
    gradient: Vec<f32>,
    on_device: bool,
}

impl OneRank {
    fn choose(
        &mut self,
        method: Method,
        (step, may_lead): (u64, bool),
        (gradient, on_device): (Vec<f32>, bool),
    ) -> Turned {
        self.riding.begin();
        self.bucket.enter();
        let lists = Memory::new(self.bucket.list_bytes(method));
        let source = Memory::of(&gradient);
        if on_device {
            self.settle(step);
            let given = Gradient { at: source.span(), dtype: DType::F32, weights: (1.0, 1.0) };
            let device = Emulated::new(step).unwrap();
            self.bucket.choose_on(&device, (method, may_lead), given, lists.span()).unwrap();
        } else {
            self.bucket.choose(method, &gradient, step, may_lead);
        }
        Turned { lists, source, gradient, on_device }
    }

    fn take_at(
        &mut self,
        method: Method,
        leader: (usize, bool),
        message: &[u8],
        turned: &Turned,
    ) -> (Status, Vec<f32>) {
        let mut values = vec![0.0; self.bucket.kept(method)];
        let status = match turned.on_device {
            true => {
                let device = Emulated::new(self.rank).unwrap();
                self.bucket.take_on(&device, (method, leader), message, (turned.lists.span(), &mut values))
            }
            false => self.bucket.take(method, leader, message, &mut values),
        };
        (status, values)
    }

    fn scatter(&mut self, heard: &Heard, sums: &[f32], turned: &Turned) -> (Result<Ran, EngineError>, Vec<f32>) {
        self.riding.finish();
        if turned.on_device {
            let device = Emulated::new(self.rank).unwrap();
            let out = (turned.lists.span(), turned.source.span());
            let ran = self.bucket.scatter_on(&device, (heard, sums, WORLD), out);
            return (ran, turned.source.f32s());
        }
        let mut out = turned.gradient.clone();
        (self.bucket.scatter(heard, sums, WORLD as usize, &mut out), out)
    }
}

/// A step of all ranks; which of them work on the device, and whose gradient is broken.
fn agreed_step(ranks: &mut [OneRank], step: u64, (method, sides): (Method, [bool; 3]), broken: Option<usize>) -> Step {
    let leader = step as usize % ranks.len();
    let bid = step.is_multiple_of(2);
    let mut turned = Vec::new();
    for (number, rank) in ranks.iter_mut().enumerate() {
        let mut gradient = gradient(rank.rank, step);
        if broken == Some(number) {
            gradient[5] = f32::NAN;
        }
        turned.push(rank.choose(method, (step, bid || number == leader), (gradient, sides[number])));
    }
    let mut message = vec![0; ranks[leader].bucket.message_bytes(method, Part::Indices)];
    let leads = ranks[leader].bucket.write_indices(&mut message) == Status::default();
    let mut sums = vec![0.0; ranks[leader].bucket.kept(method)];
    let mut heard = Heard::default();
    for (rank, turned) in ranks.iter_mut().zip(&turned) {
        let (status, values) = rank.take_at(method, (leader, leads), &message, turned);
        heard.not_finite += u32::from(status.not_finite);
        heard.failed += u32::from(status.failed);
        sums.iter_mut().zip(&values).for_each(|(sum, value)| *sum += value);
    }
    ranks.iter_mut().zip(&turned).map(|(rank, turned)| rank.scatter(&heard, &sums, turned)).collect()
}

/// AR-Topk: leaders and bids change hands, each rank works where it likes, k changes, gradients of the leader and of another
/// rank are not finite: means, memories, weights and norms have the bits of the host.
#[test]
fn agreed_indices_have_the_bits_of_the_host_on_either_side() {
    if Emulated::new(0).is_none() {
        return;
    }
    let (mut mixed, mut host) = (all(), all());
    for step in 0..9u64 {
        let method = topk([0.1, 0.01][step as usize / 4 % 2]);
        let broken = [(4, 1), (7, 0)].iter().find(|(at, _)| *at == step).map(|(_, rank)| *rank);
        let got = agreed_step(&mut mixed, step, (method, [false, true, step % 3 != 0]), broken);
        let want = agreed_step(&mut host, step, (method, [false; 3]), broken);
        for (rank, ((got, mean), (want, same))) in got.iter().zip(&want).enumerate() {
            let (got, want) = (*got.as_ref().unwrap(), *want.as_ref().unwrap());
            assert_eq!(got, want, "rank {rank}, step {step}");
            assert_eq!(got == Ran::NotFinite, broken.is_some());
            assert!(got != Ran::Good || bits(mean) == bits(same), "rank {rank}, step {step}");
        }
        for (a, b) in mixed.iter_mut().zip(&mut host) {
            let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * b.abs();
            assert!(close(a.bucket.norm(), b.bucket.norm()), "rank {}, step {step}", a.rank);
            assert!(close(a.bucket.energy().sent, b.bucket.energy().sent), "rank {}, step {step}", a.rank);
            if broken.is_none() {
                assert_eq!(a.held(step), b.held(step), "rank {}, step {step}", a.rank);
            }
        }
        // The host's way back adds and takes away again, and rounds: go on from the same.
        if broken.is_some() {
            for (a, b) in mixed.iter_mut().zip(&mut host) {
                let here: Vec<f32> = a.held(step).into_iter().map(f32::from_bits).collect();
                let there: Vec<f32> = b.held(step).into_iter().map(f32::from_bits).collect();
                assert!(here.iter().zip(&there).all(|(a, b)| (a - b).abs() < 1e-5), "rank {}", a.rank);
                b.bucket.set_residual(flexcomm_compression::Memory::from_values(here), true).unwrap();
            }
        }
    }
}

/// A leader's message that is none, or a step that another rank could not do, fails on all ranks and changes nothing.
#[test]
fn agreed_indices_that_are_none_change_nothing() {
    if Emulated::new(0).is_none() {
        return;
    }
    let (mut ranks, method) = (all(), topk(0.1));
    agreed_step(&mut ranks, 0, (method, [true; 3]), None);
    let before: Vec<_> = ranks.iter_mut().map(|rank| rank.held(0)).collect();
    let turned = ranks[1].choose(method, (1, true), (gradient(1, 1), true));
    let (status, values) = ranks[1].take_at(method, (2, true), &[1, 2, 3], &turned);
    assert!(status.failed && values.iter().all(|value| *value == 0.0));
    let failed = Heard { failed: 1, ..Heard::default() };
    let sums = vec![0.0; values.len()];
    let (ran, _) = ranks[1].scatter(&failed, &sums, &turned);
    assert!(ran.unwrap_err().to_string().contains("could not do its part"));
    assert_eq!(ranks[1].held(1), before[1]);
    // Given up after the values were taken.
    let turned = ranks[1].choose(method, (2, true), (gradient(1, 2), true));
    let mut message = vec![0; ranks[1].bucket.message_bytes(method, Part::Indices)];
    ranks[1].bucket.write_indices(&mut message);
    assert_eq!(ranks[1].take_at(method, (1, true), &message, &turned).0, Status::default());
    ranks[1].riding.finish();
    assert_eq!(ranks[1].held(2), before[1]);
    let why = flexcomm_engine::chooses(&"mstopk@0.1/art-ring:star".parse().unwrap()).unwrap_err().to_string();
    assert!(why.contains("by top-k alone"), "{why}");
}

/// Whatever the host does with a bucket (a flush, checkpoints, trials, new layouts) begins with fetching.
#[test]
fn what_is_held_back_comes_home_when_the_host_needs_it() {
    if Emulated::new(0).is_none() {
        return;
    }
    let method = topk(0.1);
    let mut store = Store::default();
    store.layout(0, PARAMS.to_vec()).unwrap();
    let mut one = OneRank::new(0);
    let source = gradient(0, 0);
    let mut compressed = |store: &Store| {
        std::mem::swap(&mut one.bucket, &mut lock(&store.bucket(0).unwrap()));
        let given = one.give(0, method, (source.clone(), Some(DType::F32)));
        let block = given.block.clone();
        // Alone in the world as far as the bucket knows: one block three times.
        let blocks = vec![block; 3];
        let ran = one.take(method, &blocks, given).0;
        one.riding.finish();
        assert!(matches!(ran, Ok(Ran::Good)), "{ran:?}");
        std::mem::swap(&mut one.bucket, &mut lock(&store.bucket(0).unwrap()));
        assert!(lock(&store.bucket(0).unwrap()).is_resident());
    };
    compressed(&store);
    let held = store.export().unwrap();
    assert!(!lock(&store.bucket(0).unwrap()).is_resident());
    assert_eq!((held[&0].len(), held[&1].len()), (2000, 501));
    assert!(held.values().flatten().any(|value| *value != 0.0));
    let (mut auto, mut saved) = (flexcomm_engine::AutoSelection::new(3), flexcomm_engine::Saved::default());
    compressed(&store);
    store.save_into(&auto, &mut saved).unwrap();
    let before = store.export().unwrap();
    compressed(&store);
    store.restore(&mut auto, &saved).unwrap();
    assert_eq!(store.export().unwrap(), before);
    compressed(&store);
    let after = {
        store.layout(0, vec![PARAMS[1], PARAMS[0]]).unwrap();
        store.export().unwrap()
    };
    assert_eq!(after.keys().collect::<Vec<_>>(), [&0, &1]);
    assert_ne!(after, before, "a step more");
    store.layout(0, PARAMS.to_vec()).unwrap();
    compressed(&store);
    let mut out = vec![0.0; N];
    let bucket = store.bucket(0).unwrap();
    assert_eq!(lock(&bucket).flush(&vec![0.0; N], 1, &mut out), Status::default());
    assert!(out.iter().any(|value| *value != 0.0), "what was held back goes out");
}

#[test]
fn methods_without_kernels_are_named() {
    let of = |compressor| Method::new(compressor, CompressionRatio::new(0.1).unwrap());
    assert_eq!(kernels(of(Compressor::TopK), (2, 7), 0), Ok(Kernels::TopK(7)));
    assert_eq!(kernels(of(Compressor::LwTopK), (1, 7), 0), Ok(Kernels::TopK(7)));
    assert!(matches!(kernels(of(Compressor::MsTopK), (2, 7), 5), Ok(Kernels::Threshold(_))));
    let why = kernels(of(Compressor::LwTopK), (2, 7), 0).unwrap_err().to_string();
    assert!(why.contains("lwtopk of several layers in one bucket has no kernels yet"), "{why}");
}
