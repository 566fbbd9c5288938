//! Whether kept curves are what this program trains here: the first steps of two settings are trained anew.

use crate::files;
use crate::fixed::{self, Curve, Curves, DENSE, Library, TEST_EVERY};
use crate::ranks::{Data, Ranks, Recipe, Stepped};
use anyhow::{Context, Result, ensure};
use flexcomm_domain::Strategy;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// A sum, and a gather whose sizes do not depend on the values.
const SETTINGS: [&str; 2] = [DENSE, "topk(k=0.01)+ef(vanilla)/allgather"];

/// What a setting's first steps show.
struct Begun {
    losses: Vec<f64>,
    /// In the mean of the steps, by bucket and collective.
    bytes: Vec<Vec<f64>>,
}

/// Trains a job's first steps, a test interval of them, by dense and by top-k, and compares test losses and bytes. A check that passed
/// with the same curves and program is remembered beside the curves that are trained here.
///
/// # Errors
/// A curve that shows something else: it is of another program, of other images or of another kind of processor.
pub fn check(library: &Library, recipe: &Recipe, curves: &Curves, binary: &str) -> Result<()> {
    // Cells of one job come at once: the second finds what the first has left.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _only = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let (passed, digest) = (fixed::file(&library.trained.join("checked"), recipe), files::digest(&(curves, binary))?);
    if files::read_json::<String>(&passed).ok().as_ref() == Some(&digest) {
        return Ok(());
    }
    let data = library.data.of(recipe.world)?;
    let kept = fixed::file(&library.kept, recipe);
    let path = if kept.exists() { kept } else { fixed::file(&library.trained, recipe) };
    for curve in SETTINGS.into_iter().filter_map(|setting| curves.of(setting).ok()) {
        compare(curve, &begun(recipe, &data, &curve.setting)?, &path)?;
    }
    files::write_json(&passed, &digest)
}

fn compare(curve: &Curve, begun: &Begun, path: &Path) -> Result<()> {
    let Curve { setting, losses, rounds, .. } = curve;
    let losses = &losses[..losses.len().min(begun.losses.len())];
    let bytes: Vec<Vec<f64>> = rounds.iter().map(|bucket| bucket.iter().map(|round| round.bytes).collect()).collect();
    ensure!(
        losses == begun.losses && bytes == begun.bytes,
        "{}: {setting} has the test losses {losses:?} and bytes {bytes:?}, and trained here {:?} and {:?}: the curves are of \
         another program, of other images or of another kind of processor. Remove the file, and its curves are trained anew \
         (minutes)",
        path.display(),
        begun.losses,
        begun.bytes
    );
    Ok(())
}

fn begun(recipe: &Recipe, data: &Arc<Data>, setting: &str) -> Result<Begun> {
    let strategy: Strategy = setting.parse().with_context(|| format!("read the strategy {setting}"))?;
    let mut ranks = Ranks::new(*recipe, data.clone())?;
    let mut losses = vec![ranks.test().loss];
    let mut steps: Vec<Stepped> = Vec::new();
    for step in 0..TEST_EVERY.min(recipe.steps) {
        match ranks.step(step, &strategy) {
            Ok(stepped) => steps.push(stepped),
            // Values that are not finite: the curve ends there as well.
            Err(_) if step > 0 => break,
            Err(error) => return Err(error.context(format!("train by {setting}"))),
        }
    }
    if steps.len() as u64 == TEST_EVERY {
        losses.push(ranks.test().loss);
    }
    losses.iter_mut().for_each(|loss| *loss = fixed::rounded(fixed::finite(*loss)));
    let count = steps.len() as f64;
    let mean = |bucket: usize, round: usize| {
        steps.iter().map(|step| step.buckets[bucket].rounds[round].bytes as f64).sum::<f64>() / count
    };
    let of = |bucket: usize| (0..steps[0].buckets[bucket].rounds.len()).map(|round| mean(bucket, round)).collect();
    let bytes = steps.first().map_or(Vec::new(), |first| (0..first.buckets.len()).map(of).collect());
    Ok(Begun { losses, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixed::Shared;
    use crate::ranks::Model;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn curves_that_are_not_what_is_trained_here_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let recipe = Recipe {
            model: Model::Convolutional,
            world: 2,
            momentum: 0.9,
            learning_rate: 0.05,
            batch: 32,
            steps: 50,
            seed: 1,
        };
        let library = |images: &[usize]| {
            let path = |name: &str| folder.path().join(name);
            Library::new(path("kept"), path("trained"), Shared::synthetic(images), Arc::new(AtomicBool::new(false)))
        };
        let data = library(&[2]).data.of(2).unwrap();
        let train = |setting: &str| fixed::train(recipe, &data, &(setting.to_owned(), setting.parse().unwrap()));
        let curves = Curves { recipe, curves: SETTINGS.map(|setting| train(setting).unwrap()).to_vec() };
        curves.write(&folder.path().join("kept")).unwrap();
        let refused = |change: &dyn Fn(&mut Curve)| {
            let mut other = curves.clone();
            change(&mut other.curves[1]);
            format!("{:#}", check(&library(&[2]), &recipe, &other, "a").unwrap_err())
        };
        for error in [refused(&|curve| curve.losses[1] *= 1.001), refused(&|curve| curve.rounds[1][0].bytes += 1.0)] {
            for part in ["kept/convolutional-n2-m0.9-lr0.05-b32-t50-s1.json: topk(k=0.01)", "Remove the file"] {
                assert!(error.contains(part), "no {part:?} in {error}");
            }
        }
        check(&library(&[2]), &recipe, &curves, "a").unwrap();
        // Without images nothing can be trained: remembered, for these curves and this program.
        check(&library(&[]), &recipe, &curves, "a").unwrap();
        assert!(check(&library(&[]), &recipe, &curves, "b").is_err());
        assert!(refused(&|curve| curve.losses[0] *= 1.001).contains("Remove the file"));
    }
}
