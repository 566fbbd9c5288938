//! What every registered codec must keep, each with all of its examples. A new line in the registry is tested here
//! without another word.

use crate::allocations::allocations;
use crate::harness::*;
use flexcomm_compression::Build;
use flexcomm_compression::codec::{EncodeError, Target, Travels};
use flexcomm_compression::pipeline::{Gradient, Member, Pipeline, Step};
use flexcomm_compression::random::Stream;
use flexcomm_compression::wire::{Envelope, Reader, Writer};
use flexcomm_compression::{Kernel, Layers};
use flexcomm_domain::spec::{Class, CompressorSpec, Nature};

fn each(check: impl Fn(&CompressorSpec)) {
    every_strategy().iter().for_each(check);
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn the_text_round_trips() {
    each(|strategy| {
        let checksum = if strategy.travels() == Travels::Gathers { "+checksum(crc32c)" } else { "" };
        for rest in ["", "+ef(vanilla)+nesterov(mu=0.9)", &format!("{checksum}+nonfinite(skip)+seed(7)")] {
            let strategy = parse(&format!("{strategy}{rest}"));
            assert_eq!(parse(&strategy.to_string()).to_string(), strategy.to_string());
        }
        let again = CompressorSpec::from_numbers(strategy.compressor(), strategy.values().all()).unwrap();
        assert_eq!(again.to_string(), strategy.to_string());
    });
}

/// A checksum does not survive a sum: refused when it is asked for, not when the first message has been sent.
#[test]
fn sums_have_no_checksum() {
    each(|strategy| {
        let text = format!("{strategy}+ef(vanilla)+checksum(crc32c)");
        match (strategy.travels(), text.parse::<CompressorSpec>()) {
            (Travels::Gathers, read) => assert!(read.is_ok(), "{text}"),
            (Travels::Sums(_), read) => {
                let (error, name) = (read.expect_err(&text).to_string(), strategy.compressor().name);
                let want = format!("set checksum of {name} to \"crc32c\": it must be none");
                assert!(error.starts_with(&want), "{error}");
                parse(&format!("{strategy}+checksum(none)"));
            }
        }
    });
}

#[test]
fn edge_tensors_go_through() {
    each(|strategy| edge_tensors().into_iter().for_each(|(name, x)| assert_goes_through(strategy, (name, &x))));
}

/// What is decoded is finite; the payload has the size that was charged; energies are what they say; taking leaves
/// x − C(x).
pub(crate) fn assert_goes_through(strategy: &CompressorSpec, (name, x): (&str, &[f32])) {
    let label = format!("{strategy} on {name}");
    let mut run = Run::new(strategy, shape(x.len()), 3);
    let (measured, sent) = run.transmit(x).unwrap_or_else(|e| panic!("{label}: failed to {e}"));
    assert!(sent.iter().all(|v| v.is_finite()), "{label}: not finite");
    assert!(run.codec.size().admits(run.payload.len()), "{label}: {} bytes", run.payload.len());
    assert!(measured.compensated.is_finite() && measured.sent.is_finite(), "{label}: energies {measured:?}");
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-4 * a.max(b) + 1e-70;
    assert!(close(measured.compensated, energy(x)), "{label}: compensated {} is {}", measured.compensated, energy(x));
    assert!(close(measured.sent, energy(&sent)), "{label}: sent {} is {}", measured.sent, energy(&sent));

    let mut taking = Run::new(strategy, shape(x.len()), 3);
    let mut rest = x.to_vec();
    taking.take(&mut rest).unwrap_or_else(|e| panic!("{label}: failed to {e}"));
    assert_eq!(taking.payload, run.payload, "{label}: taking sends something else");
    for i in 0..x.len() {
        let want = f64::from(x[i]) - f64::from(sent[i]);
        let slack = 1e-6 * f64::from(x[i].abs().max(sent[i].abs())) + 1e-44;
        assert!((f64::from(rest[i]) - want).abs() <= slack, "{label}: left {} of {}", rest[i], want);
    }
}

/// A tensor of zeros is sent as zeros where the method knows zero at all.
#[test]
fn zeros_stay_zeros() {
    each(|strategy| {
        if !matches!(strategy.nature(), Nature::Biased(_)) {
            assert!(compressed(strategy, &[0.0; 100], 1).iter().all(|v| *v == 0.0), "{strategy}");
        }
    });
}

#[test]
fn what_is_promised_holds() {
    let tensors = [normal(60, 4), laplace(60, 5), (0..30).map(|i| i as f32 - 14.5).collect(), vec![1.0; 20]];
    each(|strategy| {
        for x in &tensors {
            match strategy.nature() {
                Nature::Unbiased(_) => assert_unbiased(strategy, x, 4000),
                Nature::Contractive(delta) | Nature::Accumulated(delta) => assert_contractive(strategy, x, delta, 20),
                Nature::ContractiveInMean(delta) => assert_contractive_in_mean(strategy, x, delta, 2000),
                Nature::Biased(reason) => assert!(!reason.is_empty()),
            }
        }
        if let Nature::Contractive(delta) | Nature::Accumulated(delta) = strategy.nature() {
            let draws = |x: &[f32]| match x.len() {
                ..=100 => 200,
                101..=1000 => 20,
                _ => 1,
            };
            edge_tensors().iter().for_each(|(_, x)| assert_contractive(strategy, x, delta, draws(x)));
        }
    });
}

/// NaN and infinity are refused by name wherever they stand, and the state is as it was.
#[test]
fn not_finite_is_refused() {
    each(|strategy| {
        for n in [1, 8, 100, 5000] {
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for at in [0, n / 2, n - 1] {
                    let mut run = Run::new(strategy, shape(n), 9);
                    let mut x = laplace(n, 6);
                    run.transmit(&x).unwrap();
                    let saved = |run: &Run| {
                        let mut out = Writer::new();
                        run.codec.save(&mut out);
                        out
                    };
                    let before = saved(&run);
                    x[at] = bad;
                    run.context.round = 0;
                    let error = run.codec.encode(&x, &run.context, &mut Writer::new()).unwrap_err();
                    let named = matches!(error, EncodeError::NonFinite { index, value }
                        if index == at && value.to_bits() == bad.to_bits());
                    assert!(named, "{strategy}, n = {n}: {error}");
                    let error = run.codec.encode_taking(&mut x, &run.context, &mut Writer::new()).unwrap_err();
                    assert!(matches!(error, EncodeError::NonFinite { .. }), "{strategy}: {error}");
                    assert_eq!(saved(&run), before, "{strategy}: the state moved");
                }
            }
        }
    });
}

/// Kernels, and the numbers of a pass before, change no byte.
#[test]
fn every_kernel_sends_the_same_bytes() {
    each(|strategy| {
        for (name, x) in edge_tensors() {
            let mut reference: Option<(Writer, Vec<u32>)> = None;
            for kernel in Kernel::available() {
                let mut run = Run::new(strategy, shape(x.len()), 3);
                run.context.kernel = kernel;
                let (_, sent) = run.transmit(&x).unwrap();
                let got = (run.payload, bits(&sent));
                assert_eq!(reference.get_or_insert(got.clone()), &got, "{strategy} on {name} with {kernel:?}");
                let mut run = Run::new(strategy, shape(x.len()), 3);
                run.context.kernel = kernel;
                run.context.known = Some(run.context.stats(&x).unwrap());
                run.transmit(&x).unwrap();
                assert_eq!(run.payload, got.0, "{strategy} on {name} with known numbers");
            }
        }
    });
}

/// Every cut of a payload is refused, and no change of it makes the decoder panic, over-read or answer NaN.
#[test]
fn broken_payloads_are_refused_or_read() {
    let stream = Stream::new(5, [0; 4]);
    each(|strategy| {
        for x in [vec![], vec![1.5], laplace(50, 7), normal(333, 8)] {
            let mut run = Run::new(strategy, shape(x.len()), 3);
            run.transmit(&x).unwrap();
            let good = run.payload.bytes().to_vec();
            let mut out = vec![0.0; x.len()];
            let mut decode = |bytes: &[u8]| {
                out.fill(0.0);
                let mut from = Reader::new(bytes);
                let result = run.codec.decode(&mut from, &run.context, Target::add(1.0, &mut out));
                assert!(result.is_err() || out.iter().all(|v| v.is_finite()), "{strategy}: decoded to NaN");
                result
            };
            for end in 0..good.len() {
                assert!(decode(&good[..end]).is_err(), "{strategy}: a payload cut at {end} was read");
            }
            for i in 0..500 {
                let mut changed = good.clone();
                for flip in 0..=i % 3 {
                    if !changed.is_empty() {
                        let at = stream.below(10 * i + 2 * flip, changed.len() as u64) as usize;
                        changed[at] ^= 1 << stream.below(10 * i + 2 * flip + 1, 8);
                    }
                }
                let _ = decode(&changed);
                let noise: Vec<u8> =
                    (0..good.len() as u32 + 3).map(|j| stream.word(j ^ (i as u32) << 12) as u8).collect();
                let _ = decode(&noise);
            }
        }
    });
}

/// The same values, state and context give the same bytes; another seed may not change what is no random method.
#[test]
fn runs_repeat() {
    each(|strategy| {
        let x = laplace(777, 9);
        let once = |seed| {
            let mut run = Run::new(strategy, shape(x.len()), seed);
            run.transmit(&x).unwrap();
            run.payload
        };
        assert_eq!(once(4), once(4), "{strategy}");
    });
}

#[test]
fn steps_after_the_first_allocate_nothing() {
    each(|strategy| {
        // What is unbiased and not scaled may diverge under error feedback: its memory decays.
        let compensated = parse(&format!("{strategy}+ef(vanilla)"));
        let decays = matches!(strategy.nature(), Nature::Unbiased(_)) && !compensated.is_scaled();
        let memory = if decays { "vanilla,beta=0.001" } else { "vanilla" };
        for with in ["", &format!("+ef({memory})+nesterov(mu=0.5)")] {
            let (n, text) = (20_000, format!("{strategy}{with}"));
            let layers = Layers::matrices(&[shape(n)]).unwrap();
            let mut pipeline = Pipeline::new(&parse(&text), layers, Member::alone(3));
            let gradients: Vec<Vec<f32>> = (0..6).map(|seed| laplace(n, seed)).collect();
            let (mut out, mut mean) = (Writer::new(), vec![0.0; n]);
            let mut step = |i: usize| {
                let step = Step { index: i as u64, learning_rate: 0.1 };
                let mut more = pipeline.compress(Gradient::F32(&gradients[i % 6]), step, &mut out).unwrap().more;
                while more {
                    let sum = out.bytes().to_vec();
                    more = pipeline.advance(&sum, &mut out).unwrap().more;
                }
                pipeline.decompress(out.bytes(), i as u64, &mut mean).unwrap();
                match pipeline.travels() {
                    Travels::Sums(_) => pipeline.mean(out.bytes(), i as u64, &mut mean).unwrap(),
                    _ => pipeline.aggregate(&[out.bytes(); 3], i as u64, &mut mean).unwrap(),
                }
            };
            step(0);
            for i in 1..12 {
                let rounds_copies = u64::from(parse(&text).codec(shape(n)).rounds() - 1);
                let count = allocations(|| step(i));
                assert_eq!(count, rounds_copies, "{text}, step {i}");
            }
        }
    });
}

/// Two pipelines, one of which was saved and restored into a new one, go on alike to the last bit.
#[test]
fn saved_state_goes_on_bit_for_bit() {
    each(|strategy| {
        for with in ["", "+ef(vanilla)", "+ef(vanilla)+nesterov(mu=0.9)"] {
            let (n, text) = (300, format!("{strategy}{with}"));
            let mut first = Ranks::new(&text, n, 2);
            let gradients = |step: u64| vec![laplace(n, step), normal(n, step)];
            (0..5).for_each(|step| drop(first.step(&gradients(step), step)));
            let mut second = Ranks::new(&text, n, 2);
            for (from, to) in first.pipelines.iter().zip(&mut second.pipelines) {
                let (mut saved, mut again) = (Writer::new(), Writer::new());
                from.save(&mut saved);
                to.restore(saved.bytes()).unwrap_or_else(|e| panic!("{text}: failed to {e}"));
                to.save(&mut again);
                assert_eq!(saved, again, "{text}");
                for end in 0..saved.len() {
                    assert!(to.restore(&saved.bytes()[..end]).is_err(), "{text} cut at {end}");
                }
                to.save(&mut again);
                assert_eq!(saved, again, "{text}");
            }
            for step in 5..10 {
                let (a, b) = (first.step(&gradients(step), step), second.step(&gradients(step), step));
                assert_eq!(bits(&a), bits(&b), "{text}");
                assert_eq!(first.messages, second.messages, "{text}");
            }
        }
    });
}

/// What travels as sums: decoding the sum is the mean of the decoded, to rounding.
#[test]
fn sums_mean_what_the_parts_mean() {
    each(|strategy| {
        if !matches!(strategy.travels(), Travels::Sums(_)) {
            return;
        }
        let (n, world) = (240, 3);
        let mut ranks = Ranks::new(&strategy.to_string(), n, world);
        let gradients: Vec<Vec<f32>> = (0..u64::from(world)).map(|seed| normal(n, seed)).collect();
        let mean = ranks.step(&gradients, 0);
        let mut sum = vec![0.0f64; n];
        for (pipeline, message) in ranks.pipelines.iter_mut().zip(&ranks.messages) {
            let mut one = vec![0.0; n];
            pipeline.decompress(message.bytes(), 0, &mut one).unwrap();
            sum.iter_mut().zip(&one).for_each(|(sum, v)| *sum += f64::from(*v) / f64::from(world));
        }
        let worst = sum.iter().zip(&mean).map(|(a, b)| (a - f64::from(*b)).abs()).fold(0.0, f64::max);
        let coarse = strategy.travels() != Travels::Sums(flexcomm_compression::codec::Element::F32);
        assert!(worst <= if coarse { 0.05 } else { 1e-5 }, "{strategy}: off by {worst}");
    });
}

/// Messages of several layers, some empty, in either scope; the size charged is what all rounds sent; each cut is refused.
#[test]
fn messages_hold_several_tensors() {
    each(|strategy| {
        for scope in ["bucket", "tensor"] {
            for checksum in ["none", "crc32c"] {
                if checksum == "crc32c" && strategy.travels() != Travels::Gathers {
                    continue;
                }
                let layers = Layers::new(&[7, 0, 1, 500, 16]).unwrap();
                let text = format!("{strategy}+scope({scope})+checksum({checksum})+ef(vanilla)");
                let mut pipeline = Pipeline::new(&parse(&text), layers.clone(), Member::alone(3));
                let (gradient, mut out) = (laplace(layers.values(), 3), Writer::new());
                let step = Step { index: 2, learning_rate: 1.0 };
                let mut outcome = pipeline.compress(Gradient::F32(&gradient), step, &mut out).unwrap();
                let (mut sent, mut round) = (out.len(), 0);
                while outcome.more {
                    assert!(pipeline.round_size(round).admits(out.len()), "{text}: {} bytes, round {round}", out.len());
                    let sum = out.bytes().to_vec();
                    outcome = pipeline.advance(&sum, &mut out).unwrap();
                    (sent, round) = (sent + out.len(), round + 1);
                }
                assert!(pipeline.round_size(round).admits(out.len()), "{text}: {} bytes, round {round}", out.len());
                assert!(pipeline.size().admits(sent), "{text}: {sent} bytes, {:?}", pipeline.size());
                let mut mean = vec![0.0; gradient.len()];
                pipeline.decompress(out.bytes(), 2, &mut mean).unwrap();
                let header = Envelope::parse(out.bytes()).unwrap().header;
                assert_eq!((header.method, header.n), (strategy.entry().code, gradient.len() as u64));
                for end in 0..out.len() {
                    assert!(pipeline.decompress(&out.bytes()[..end], 2, &mut mean).is_err(), "{text} cut at {end}");
                }
                let residual = pipeline.residual();
                for i in 0..gradient.len() {
                    pipeline.decompress(out.bytes(), 2, &mut mean).unwrap();
                    let off = (mean[i] + residual[i] - gradient[i]).abs();
                    assert!(off <= 1e-5 * gradient[i].abs().max(mean[i].abs()), "{text}: value {i} off by {off}");
                }
            }
        }
    });
}

/// The table's ω, which prices are made with, is that of the codec on normal values.
#[test]
fn the_variance_of_unbiased_codecs_is_as_the_table_says() {
    each(|strategy| {
        let Nature::Unbiased(variance) = strategy.nature() else { return };
        let (n, draws) = if strategy.compressor().class == Class::LowRank { (1 << 12, 200) } else { (1 << 14, 20) };
        let x = normal(n, 4);
        let off =
            |seed| compressed(strategy, &x, seed).iter().zip(&x).map(|(c, x)| f64::from(c - x).powi(2)).sum::<f64>();
        let measured = (0..draws).map(off).sum::<f64>() / (draws as f64 * energy(&x));
        let said = variance(strategy.values(), n).max(0.0);
        let slack = 0.25 * said.max(measured) + 1e-6;
        assert!((measured - said).abs() <= slack, "{strategy}: measured {measured}, the table says {said}");
    });
}

/// The table's gain of other codecs, which decisions assume until a trial has measured it, is that of the codec: on normal values
/// within a tenth, on those of heavier tails (Laplace) within a half. Of 3LC, whose unit is the largest value, within 0.3 and 0.8.
#[test]
fn the_gain_of_biased_codecs_is_as_the_table_says() {
    let n = 1 << 14;
    let check = |strategy: &CompressorSpec, sample: fn(usize, u64) -> Vec<f32>, slack: f64| {
        let values = strategy.values();
        // What learns from a step is looked at for a whole period.
        let steps = if strategy.compressor().name == "gradiveq" { values.whole(2) as u64 + 1 } else { 20 };
        let mut ranks = Ranks::new(&strategy.to_string(), n, 1);
        let (mut all, mut lost, mut top) = (0.0, 0.0, 0.0);
        for step in 0..steps {
            let mut x = sample(n, 100 + step);
            lost += distance(&x, &ranks.step(std::slice::from_ref(&x), step));
            all += energy(&x);
            x.sort_by(|a, b| b.abs().total_cmp(&a.abs()));
            top += energy(&x[..values.kept(0, n)]);
        }
        let (measured, said) = (1.0 - lost / all, strategy.typical_gain(n as u64, top / all).unwrap());
        let close = (measured - said).abs() <= slack * measured + 5e-4;
        assert!(close, "{strategy}: measured {measured}, the table says {said}");
    };
    each(|strategy| {
        let name = strategy.compressor().name;
        // Of fewer values a sample of 1024 has no threshold.
        let sampled = name == "adaptivethreshold" && strategy.values().kept(0, n) < n / 256;
        let biased = !matches!(strategy.nature(), Nature::Unbiased(_));
        if biased && !sampled && strategy.typical_gain(1, 1.0).is_some() {
            let (on_normal, on_laplace) = if name == "threelc" { (0.3, 0.8) } else { (0.1, 0.5) };
            check(strategy, normal, on_normal);
            check(strategy, laplace, on_laplace);
        }
    });
}
