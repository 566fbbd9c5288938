//! Strategies that texts name, of buckets on a device (the kernels' emulator) and on the host side by side: the same parts of
//! every turn, the same means, the same memories; ranks change sides as they like.

#![allow(clippy::unwrap_used)]

mod lent;

use flexcomm_compression::codec::Element;
use flexcomm_compression::pipeline::{Member, Step};
use flexcomm_compression::wire::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use flexcomm_domain::spec::{Class, CompressorSpec};
use flexcomm_engine::{How, OnHost, Param, Piped, Ran, Turn, layers};
use flexcomm_gpu_kernels::bucket::Gradient;
use flexcomm_gpu_kernels::{Copies, DType, Device, LaunchError, Span};
use flexcomm_trainer::{Heard, Status};
use lent::{Emulated, Lent, Memory};

const PARAMS: [Param; 3] =
    [Param { id: 0, len: 1201, cols: 1 }, Param { id: 1, len: 5, cols: 1 }, Param { id: 2, len: 1000, cols: 8 }];
const N: usize = 2206;
const WORLD: u32 = 3;

fn member(rank: u32) -> Member {
    Member { seed: 7, rank, world: WORLD, tensor: 3 }
}

fn device(seed: u64) -> Emulated {
    Emulated::new(seed).unwrap()
}

fn settle(piped: &mut Piped, rank: u32) {
    if piped.is_resident() {
        return;
    }
    let memory = Memory::new(piped.lent_bytes(member(rank)).unwrap());
    let span = memory.span();
    let home = Lent { device: device(1), _memory: memory };
    piped.reside(&device(2), member(rank), (Box::new(home), span)).unwrap();
}

fn gradient(step: u64, rank: u64) -> Vec<f32> {
    let wave = |i: u64| ((i * 37 + rank * 59 + step * 101) % 997) as f32 / 500.0 - 1.0;
    (0..N as u64).map(|i| wave(i) * wave(i / 3)).collect()
}

/// What torch.distributed would do with the ranks' parts.
fn carry(turn: Turn, parts: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let How::Sum(element) = turn.how else { return parts.to_vec() };
    let halves = |part: &[u8]| part.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b)).collect::<Vec<u16>>();
    let widened = |part: &[u8], widen: fn(&[u16], &mut [f32])| {
        let mut out = vec![0.0; part.len() / 2];
        widen(&halves(part), &mut out);
        out
    };
    let wide = |part: &Vec<u8>| -> Vec<f32> {
        match element {
            Element::F32 => part.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Element::F16 => widened(part, f16_to_f32),
            Element::Bf16 => widened(part, bf16_to_f32),
        }
    };
    let mut sum = wide(&parts[0]);
    for part in &parts[1..] {
        sum.iter_mut().zip(wide(part)).for_each(|(sum, value)| *sum += value);
    }
    let mut narrow = vec![0; sum.len()];
    match element {
        Element::F32 => return vec![sum.iter().flat_map(|value| value.to_le_bytes()).collect()],
        Element::F16 => f32_to_f16(&sum, &mut narrow),
        Element::Bf16 => f32_to_bf16(&sum, &mut narrow),
    }
    vec![narrow.iter().flat_map(|value| value.to_le_bytes()).collect()]
}

fn heard(ranks: &[Piped]) -> Heard {
    let count = |which: fn(Status) -> bool| ranks.iter().filter(|r| which(r.status())).count() as u32;
    let none = Heard { failed: 0, first_failed: None, not_finite: 0, first_not_finite: None };
    Heard { failed: count(|s| s.failed), not_finite: count(|s| s.not_finite), ..none }
}

/// Parts of every turn, and every rank's result.
type Seen = (Vec<Vec<Vec<u8>>>, Vec<(Ran, Vec<f32>)>);

fn step(ranks: &mut [Piped], at: Step, (gradients, sides): (&[Vec<f32>], [bool; 3])) -> Seen {
    let sources: Vec<Memory> = gradients.iter().map(|gradient| Memory::of(gradient)).collect();
    let mut turns = Vec::new();
    // Of three parameter groups, one of which follows the others at its own pace and one of which is frozen at times.
    let other = 0.1 * (1 + at.index % 3) as f64;
    let frozen = if at.index.is_multiple_of(2) { 0.0 } else { at.learning_rate };
    for (rank, piped) in ranks.iter_mut().enumerate() {
        piped.layer_rates(&[at.learning_rate, other, frozen]).unwrap();
        turns.push(if sides[rank] {
            settle(piped, rank as u32);
            let given = Gradient { at: sources[rank].span(), dtype: DType::F32, weights: (1.0, 1.0) };
            match piped.begin_on(&device(at.index + rank as u64), given, at) {
                Ok(turn) => turn,
                Err(OnHost::Variance) => piped.begin(&gradients[rank], at),
                Err(why) => panic!("{why}"),
            }
        } else {
            piped.begin(&gradients[rank], at)
        });
    }
    let mut said = Vec::new();
    loop {
        let turn = turns[0];
        assert!(turns.iter().all(|t| *t == turn), "{turns:?}");
        let mut parts = vec![vec![1; turn.bytes]; ranks.len()];
        ranks.iter_mut().zip(&mut parts).for_each(|(r, p)| r.write(p));
        let arrived = carry(turn, &parts);
        said.push(parts);
        let (views, heard) = (arrived.iter().map(Vec::as_slice).collect::<Vec<_>>(), heard(ranks));
        if turn.last {
            let word = turn.word.then_some(&heard);
            let end = |(rank, piped): (usize, &mut Piped)| {
                if sides[rank] && piped.is_resident() {
                    let ran = piped.end_on(&device(rank as u64), (word, &views), sources[rank].span()).unwrap();
                    return (ran, sources[rank].f32s());
                }
                let mut out = gradients[rank].clone();
                (piped.end(word, &views, &mut out).unwrap(), out)
            };
            return (said, ranks.iter_mut().enumerate().map(end).collect());
        }
        turns = ranks.iter_mut().map(|r| r.next(&heard, &views).unwrap()).collect();
    }
}

fn all(text: &str) -> Vec<Piped> {
    let strategy: CompressorSpec = text.parse().unwrap();
    (0..WORLD).map(|rank| Piped::new(0, &strategy, layers(&PARAMS).unwrap(), member(rank))).collect()
}

/// Bits; of zeros any sign, since adding has one and writing the other.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| if *x == 0.0 { 0 } else { x.to_bits() }).collect()
}

fn held(piped: &mut Piped, rank: u32) -> Vec<u32> {
    let resident = piped.is_resident();
    piped.come_home().unwrap();
    let held = bits(&piped.held_back());
    if resident {
        settle(piped, rank);
    }
    held
}

/// Every method, with a memory and without, the learning rate changing, one gradient that is not finite.
const TEXTS: [&str; 32] = [
    "topk(k=0.05)+ef(vanilla)",
    "topk(k=40)",
    "lwtopk(k=0.05)+ef(vanilla)",
    "mstopk(k=0.05)+ef(vanilla)",
    "dgc(k=0.1)+ef(vanilla)",
    "sgc(k=0.1)",
    "threshold(v=0.6)+ef(vanilla)",
    "hardthreshold(tau=0.5)+ef(vanilla)",
    "randomk(k=0.05)+ef(vanilla)",
    "randomk(k=0.05,scaled=true)+seed(5)",
    "randomk(k=0.05,shared=false)+ef(vanilla)+scope(tensor)",
    "qsparse(k=0.05)+ef(vanilla)",
    "qsparse(k=0.05,select=random)",
    "threelc(s=1.5)+ef(vanilla)+scope(bucket)",
    "threelc(s=1)+ef(vanilla)",
    "signsgd",
    "efsignsgd+ef(vanilla)",
    "onebit(scaling=true)",
    "onebit",
    "ssdm",
    "qsgd(s=4)+ef(vanilla)",
    "qsgd(s=64)+ef(vanilla)",
    "qsgd(s=100,bucket=0,norm=max)",
    "dithering(k=4)+ef(vanilla)",
    "terngrad",
    "lpcsvrg(bits=4)",
    "onebitsgd(per=column)+ef(vanilla)",
    "minmax8",
    "inceptionn+ef(vanilla)",
    "natural",
    "eightbit+ef(vanilla)",
    "fp16+ef(vanilla)",
];

fn compare(text: &str) {
    let (mut mixed, mut host) = (all(text), all(text));
    for index in 0..5u64 {
        let rate = [0.1, 0.1, 0.05, 0.0, 0.1][index as usize];
        let at = Step { index, learning_rate: rate };
        let mut gradients: Vec<Vec<f32>> = (0..3).map(|rank| gradient(index, rank)).collect();
        if index == 3 {
            gradients[1][2000] = f32::NAN;
        }
        let sides = [false, true, index % 2 == 0];
        let (said, got) = step(&mut mixed, at, (&gradients, sides));
        let (want, same) = step(&mut host, at, (&gradients, [false; 3]));
        assert_eq!(index == 3, got[0].0 == Ran::NotFinite, "{text}");
        if index != 3 {
            assert!(said == want, "{text}, step {index}: other messages");
        }
        for (rank, ((ran, mean), (wanted, out))) in got.iter().zip(&same).enumerate() {
            assert_eq!(ran, wanted, "{text}, step {index}, rank {rank}");
            assert!(*ran != Ran::Good || bits(mean) == bits(out), "{text}, step {index}, rank {rank}: another mean");
        }
        for (rank, (a, b)) in (0..).zip(mixed.iter_mut().zip(&mut host)) {
            assert!(held(a, rank) == held(b, rank), "{text}, step {index}, rank {rank}: another memory");
            let [a, b] = [a.energy(), b.energy()];
            // The host looks at what is left in the residual, kernels at what the message holds.
            let copies = text.parse::<CompressorSpec>().unwrap().compressor().class == Class::Sparsification;
            assert!(!copies || (a.gain() - b.gain()).abs() < 1e-6, "{text}: {a:?} {b:?}");
            assert!((a.fed - b.fed).abs() <= 1e-6 * b.fed, "{text}: {a:?} {b:?}");
        }
    }
}

#[test]
fn texts_have_the_messages_means_and_memories_of_the_host() {
    if Emulated::new(0).is_none() {
        return;
    }
    TEXTS.iter().for_each(|text| compare(text));
}

#[test]
fn what_has_no_kernels_says_so() {
    let texts = [
        "powersgd(rank=2)+ef(vanilla)",
        "topk(k=0.1)+ef(dgc,mu=0.9)",
        "topk(k=0.1)+ef(vanilla)+nesterov(mu=0.9)",
        "topk(k=0.1)+nonfinite(skip)",
        "qsgd(s=4,coding=gamma)",
        "signum",
        "randomk(k=0.1)+scope(tensor)",
        "topk(k=0.1)+checksum(crc32c)",
    ];
    for text in texts {
        let ranks = all(text);
        let why = ranks[0].lent_bytes(member(0)).unwrap_err().to_string();
        assert!(why.contains("has no kernels yet") && why.contains(text.split('(').next().unwrap()), "{why}");
    }
}

/// Given up between the halves, and a state for a checkpoint.
#[test]
fn a_step_that_is_never_judged_does_not_count_and_states_have_what_lies_on_the_device() {
    if Emulated::new(0).is_none() {
        return;
    }
    let text = "topk(k=0.05)+ef(vanilla)";
    let (mut ranks, mut host) = (all(text), all(text));
    let gradients: Vec<Vec<f32>> = (0..3).map(|rank| gradient(0, rank)).collect();
    let at = Step { index: 0, learning_rate: 0.1 };
    step(&mut ranks, at, (&gradients, [true; 3]));
    step(&mut host, at, (&gradients, [false; 3]));
    let source = Memory::of(&gradients[0]);
    let given = Gradient { at: source.span(), dtype: DType::F32, weights: (1.0, 1.0) };
    ranks[0].layer_rates(&[]).unwrap();
    ranks[0].begin_on(&device(4), given, Step { index: 1, learning_rate: 0.3 }).unwrap();
    ranks[0].come_home().unwrap();
    assert!(ranks[0].state() == host[0].state(), "the state of the host, to the bit");
    let short = Gradient { at: source.span().part(0, 64), ..given };
    let absent = ranks[0].begin_on(&device(4), given, at).unwrap_err().to_string();
    assert!(absent.contains("no memory on the device"), "{absent}");
    settle(&mut ranks[0], 0);
    let why = ranks[0].begin_on(&device(4), short, Step { index: 1, learning_rate: 0.1 }).unwrap_err().to_string();
    assert!(why.contains("the gradient of"), "{why}");
    assert!(held(&mut ranks[0], 0) == held(&mut host[0], 0));
}

/// Nothing can be read from it.
struct Unreadable(Emulated);

impl Device for Unreadable {
    fn launch(&self, kernel: &'static str, blocks: u32, arguments: &[u64]) -> Result<(), LaunchError> {
        self.0.launch(kernel, blocks, arguments)
    }

    fn zero(&self, span: Span) -> Result<(), LaunchError> {
        self.0.zero(span)
    }

    fn copy(&self, to: Span, from: Span) -> Result<(), LaunchError> {
        self.0.copy(to, from)
    }

    fn blocks(&self, kernel: &'static str) -> u32 {
        self.0.blocks(kernel)
    }
}

impl Copies for Unreadable {
    fn upload(&self, to: Span, bytes: &[u8]) -> Result<(), LaunchError> {
        self.0.upload(to, bytes)
    }

    fn download(&self, _: Span, _: &mut [u8]) -> Result<(), LaunchError> {
        Err(LaunchError::Driver { kernel: "memcpy", code: "refused".into() })
    }
}

/// The host takes the step that failed on the device before residuals were rescaled there.
#[test]
fn rates_that_the_device_did_not_apply_are_applied_by_the_host() {
    if Emulated::new(0).is_none() {
        return;
    }
    let text = "topk(k=0.05)+ef(vanilla)";
    let (mut ranks, mut host) = (all(text), all(text));
    let gradients: Vec<Vec<f32>> = (0..3).map(|rank| gradient(0, rank)).collect();
    let at = |index| Step { index, learning_rate: 0.1 };
    step(&mut ranks, at(0), (&gradients, [true; 3]));
    step(&mut host, at(0), (&gradients, [false; 3]));
    let source = Memory::of(&gradients[0]);
    let given = Gradient { at: source.span(), dtype: DType::F32, weights: (1.0, 1.0) };
    ranks[0].layer_rates(&[0.1, 0.2, 0.1]).unwrap();
    ranks[0].begin_on(&Unreadable(device(4)), given, at(1)).unwrap_err();
    step(&mut ranks, at(1), (&gradients, [false, true, true]));
    step(&mut host, at(1), (&gradients, [false; 3]));
    for (rank, (one, other)) in ranks.iter_mut().zip(&mut host).enumerate() {
        assert!(held(one, rank as u32) == held(other, rank as u32), "rank {rank}");
    }
}
