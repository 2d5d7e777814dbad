"""One fault or more for each promise of docs/promises.md, which its own tests must see.

    python -m tests.faults            # all of them, some minutes; before a release
    python -m tests.faults pickle     # those with the word in their promise, file or text

Each fault is put into a copy of this tree, and the tests that it names run there. They must fail
with the fault, and pass without it. The faults are mistakes that a person might make: a condition
left out, two sides exchanged, a file that is not there. tests/test_promises.py sees that each row
has one, and that its text is still in the code.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 300  # after which tests are stopped that neither pass nor fail


class Fault(NamedTuple):
    """A mistake in the code that breaks a promise.

    Attributes:
        promise: the beginning of its row in docs/promises.md.
        file: that has the mistake.
        text: of the file, in it once.
        wrong: what stands there instead.
        tests: of the row's files, as pytest takes them: the fewest that must see it.
    """

    promise: str
    file: str
    text: str
    wrong: str
    tests: tuple[str, ...]


def _fault(promise: str, file: str, text: str, wrong: str, *tests: str) -> Fault:
    return Fault(promise, file, text, wrong, tuple(f"tests/{test}" for test in tests))


FAULTS = [
    # ------------------------------------------------------------------------- networks and layer
    _fault(
        "The lambda layer for maps is the paper's",
        "lambda_det/layers/lambda_layer.py",
        "return F.normalize(_none(keys, dim, inside), dim=dim)",
        "return F.normalize(_none(keys, dim, inside), dim=-1)",
        "layers/test_lambda_layer.py::test_equals_definition",
    ),
    _fault(
        "Every implementation of the position output",
        "lambda_det/layers/local/query_first.py",
        "left, top = scope_x // 2, scope_y // 2",
        "left, top = scope_y // 2, scope_x // 2",
        "layers/test_local.py::test_equals_definition_forward_and_backward",
    ),
    _fault(
        "Every implementation of the position output",
        "lambda_det/layers/local/query_first.py",
        "apart_y = math.ceil(tiling.window_height / tiling.height)",
        "apart_y = max(tiling.window_height // tiling.height, 1)",
        "layers/test_local.py::test_query_first_adds_no_overlapping_windows_at_once",
    ),
    _fault(
        "On NVIDIA GPUs kernels compute",
        "lambda_det/native/position_output.cu",
        "a[i][m][1] = is_high ? high3[i][m] : high2[i][m];",
        "a[i][m][1] = is_high ? high2[i][m] : high3[i][m];",
        "native/test_position_output.py::test_small",
    ),
    _fault(
        "On NVIDIA GPUs kernels compute",
        "lambda_det/native/gpu.py",
        "if wrong := prove(kernels):",
        "if wrong := None:",
        "native/test_gpu.py::test_what_is_wrong_is_not_kept",
    ),
    _fault(
        "On NVIDIA GPUs kernels compute",
        "lambda_det/layers/local/fused.py",
        "kinds = tuple(FORMS) if has_backward else",
        "kinds = tuple(FORMS) if True else",
        "layers/test_fused.py::test_inference_loads_nothing_of_the_backward_pass",
    ),
    _fault(
        "Layers of other lambda packages are converted",
        "lambda_det/layers/convert.py",
        "keys[key_order], values[value_order]",
        "keys, values",
        "layers/test_convert.py::test_the_output_is_the_same",
    ),
    _fault(
        "Networks have the paper's parameter counts",
        "lambda_det/modeling/specs.py",
        "101: ((3, 4, 23, 3), (6, 12, 18)),",
        "101: ((3, 4, 23, 3), (6, 12, 18, 23)),",
        "modeling/test_specs.py::test_parameters[lambda_resnet101]",
    ),
    _fault(
        "Layers and classifiers work without Detectron2",
        "lambda_det/foundation.py",
        "            self.running_var -= eps  #",
        "            #",
        "test_imports.py::test_networks_without_detectron2",
    ),
    _fault(
        "Backbones by name and as LazyConfig nodes",
        "lambda_det/__init__.py",
        "sys.meta_path.insert(0, _WithDetectron2())",
        "pass",
        "test_imports.py::test_backbones_are_registered_by_an_import_before_or_after_detectron2",
    ),
    _fault(
        "Backbones by name and as LazyConfig nodes",
        "lambda_det/modeling/backbones.py",
        "        freeze_at=cfg.MODEL.BACKBONE.FREEZE_AT,\n",
        "",
        "modeling/test_build.py::test_options_reach_the_layers",
    ),
    _fault(
        "Backbones by name and as LazyConfig nodes",
        "lambda_det/detection/data/shapes.py",
        "return name in DatasetCatalog and Meta",
        "return name in DatasetCatalog or Meta",
        "detection/data/test_shapes.py::test_a_script_may_register_a_name_of_ours",
    ),
    _fault(
        "Backbones by name and as LazyConfig nodes",
        "lambda_det/detection/data/shapes.py",
        "    if _is_ours(name):\n",
        "    if name in DatasetCatalog:\n",
        "detection/data/test_shapes.py::test_a_script_may_register_a_name_of_ours",
    ),
    _fault(
        "A script of Detectron2 runs unchanged",
        "lambda_det/run.py",
        "sys.argv = [args.script, *words[end:]]",
        "sys.argv = [args.script, *(w for w in words[end:] if w != '--')]",
        "test_run.py::test_script_sees_what_python_would_show_it",
    ),
    # ------------------------------------------------------------------------------------ weights
    _fault(
        "A file of weights loads completely",
        "lambda_det/weights/loading.py",
        "    if reshaped := compare(own, state).reshaped:",
        "    if reshaped := ():",
        "weights/test_loading.py"
        "::test_other_parts_of_another_shape_are_refused_and_do_not_start_afresh",
    ),
    _fault(
        "A file of weights loads completely",
        "lambda_det/weights/names.py",
        "unexpected=[n for n in there if",
        "unexpected=[n for n in () if",
        "training/test_checkpointer.py::test_what_does_not_fit_is_refused_and_changes_nothing",
    ),
    _fault(
        "A file of weights loads completely",
        "lambda_det/weights/loading.py",
        "    check_shared(model, state, file)\n",
        "",
        "weights/test_loading.py::test_different_weights_for_one_shared_tensor_are_refused",
    ),
    _fault(
        "A file of weights loads completely",
        "lambda_det/weights/loading.py",
        "    if pixels is not None:\n        if wanted is not None and",
        "    if pixels is not None and wanted is not None:\n        if",
        "weights/test_loading.py::test_weights_that_record_no_pixel_settings_get_a_warning",
    ),
    _fault(
        "No file of weights can run a program",
        "lambda_det/weights/formats.py",
        "if (module, name) not in _PICKLE_GLOBALS:",
        'if module in ("os", "posix", "nt", "subprocess"):',
        "weights/test_formats.py::test_a_pickle_refers_to_what_arrays_need_and_to_nothing_else",
    ),
    _fault(
        "No file of weights can run a program",
        "lambda_det/weights/formats.py",
        "if (module, name) not in _PICKLE_GLOBALS:",
        'if (module, name) not in _PICKLE_GLOBALS and not module.startswith("numpy"):',
        "weights/test_formats.py::test_a_pickle_refers_to_what_arrays_need_and_to_nothing_else",
    ),
    _fault(
        "No file of weights can run a program",
        "lambda_det/weights/formats.py",
        "            if tarfile.is_tarfile(path):\n",
        "            if False:\n",
        "weights/test_formats.py::test_a_tar_archive_is_refused",
    ),
    _fault(
        "No file of weights can run a program",
        "lambda_det/weights/formats.py",
        "weights_only=True, mmap=mmap and zipped",
        "weights_only=False, mmap=mmap and zipped",
        "tools/test_malicious_files.py::test_weights_of_a_detector",
    ),
    _fault(
        "Weights of timm, torchvision",
        "lambda_det/weights/import_names.py",
        "lambda x: torch.cat([_objects(x), x[:1]])",
        "lambda x: torch.cat([x[:1], _objects(x)])",
        "weights/test_import_detectors.py::test_an_rcnn_is_theirs_at_every_stage",
    ),
    _fault(
        "Weights of timm, torchvision",
        "lambda_det/weights/public.py",
        '/ f"{name}.pth"',
        '/ "lambda_resnet26_slim.pth"',
        "export/test_public.py::test_weights_of_this_package_need_no_connection",
    ),
    _fault(
        "A backbone file has the features",
        "lambda_det/weights/backbone_file.py",
        "(state[var].double() + norm.eps) * factor**2 - norm.eps",
        "state[var].double() * factor**2",
        "weights/test_backbone_file.py::test_a_bias_before_the_norm_and_a_variance_below_eps",
    ),
    # ----------------------------------------------------------------------------------- training
    _fault(
        "The paper's Mask R-CNN training",
        "configs/base_mask_rcnn_fpn.yaml",
        "  BASE_LR: 0.32\n",
        "  BASE_LR: 0.02\n",
        "test_configs.py::test_the_paper_s_figures[mask_rcnn_lambdaresnet50]",
    ),
    _fault(
        "A LazyConfig means what its nodes say",
        "lambda_det/detection/lazy_components.py",
        'each.output_dir = f"{each.output_dir}{ending}"',
        "each.output_dir = str(each.output_dir)",
        "detection/test_lazy_config.py"
        "::test_the_files_of_averaged_weights_have_a_folder_of_their_own",
    ),
    _fault(
        "A LazyConfig means what its nodes say",
        "lambda_det/detection/lazy_components.py",
        "        node.lr = settings.base_lr\n",
        "        pass\n",
        "detection/test_lazy_config.py"
        "::test_the_rate_that_was_scaled_to_the_processes_reaches_the_optimiser",
    ),
    _fault(
        "A run that was killed at any moment",
        "lambda_det/training/statistics.py",
        '        self.updates = state["updates"]\n',
        "",
        "reliability/test_kills.py::test_kills_change_nothing[classification-5]",
    ),
    _fault(
        "A run that ended leaves no process",
        "lambda_det/training/loading.py",
        "    end_with_parent(parent, by_main_thread=False)\n",
        "",
        "reliability/test_left_behind.py::test_loader_processes_with_full_pipes_end[False]",
    ),
    _fault(
        "SIGTERM, SIGUSR1 and Ctrl-C finish the step",
        "lambda_det/distributed/signals.py",
        '("SIGTERM", "SIGUSR1", "SIGINT") if',
        '("SIGTERM", "SIGINT") if',
        "reliability/test_ends.py::test_a_scheduler_s_signals_save_all[one-forked]",
    ),
    _fault(
        "SIGTERM, SIGUSR1 and Ctrl-C finish the step",
        "lambda_det/distributed/signals.py",
        "            if received_signal():\n                break\n",
        "",
        "distributed/test_signals.py::test_batches_end_early_where_a_signal_asks_for_it",
    ),
    _fault(
        "SIGTERM, SIGUSR1 and Ctrl-C finish the step",
        "lambda_det/distributed/signals.py",
        "if number := max(comm.all_gather(received_signal())):",
        "if number := received_signal():",
        "distributed/test_signals.py::test_a_process_that_waits_for_another_leaves_with_it",
    ),
    _fault(
        "A GPU's memory that is too small",
        "lambda_det/training/task.py",
        'self.settings.option("accumulate", 2 * self.settings.accumulate)',
        'self.settings.option("accumulate", self.settings.accumulate)',
        "detection/test_resume.py::test_what_a_full_memory_says_to_type_continues_the_run",
    ),
    _fault(
        "TensorBoard, and an event writer",
        "lambda_det/training/hooks.py",
        "kind(settings.output_dir, **options)",
        'kind(".", **options)',
        "training/test_writers.py::test_names_that_are_there",
    ),
    _fault(
        "TensorBoard, and an event writer",
        "lambda_det/training/hooks.py",
        '"purge_step": written + 1',
        '"purge_step": 0',
        "training/test_writers.py"
        "::test_tensorboard_forgets_what_a_killed_run_wrote_after_its_checkpoint",
    ),
    _fault(
        "Other numbers of processes",
        "lambda_det/training/step.py",
        "place = index * comm.get_world_size() + comm.get_rank()",
        "place = index + comm.get_rank() * self.accumulate",
        "distributed/test_processes.py::test_a_mask_rcnn_has_the_losses_of_one_process",
    ),
    _fault(
        "Other numbers of processes",
        "lambda_det/training/stream.py",
        "(self._images, rank * size) if self._is_shared else (size, 0)",
        "(size, 0)",
        "reliability/test_other_numbers.py",
    ),
    _fault(
        "Other numbers of processes",
        "lambda_det/training/statistics.py",
        '{"one process": images // comm.get_world_size()}',
        '{"one process": images}',
        "training/test_statistics.py::test_images_by_which_norms_normalise",
    ),
    _fault(
        "Several processes on one machine",
        "lambda_det/distributed/launch.py",
        'f"Process {process.name} of {world_size}',
        'f"Process 0 of {world_size}',
        "distributed/test_launch.py::test_the_cause_is_named_and_not_what_followed",
    ),
    _fault(
        "Several machines by torchrun",
        "lambda_det/distributed/connection.py",
        'os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_kept else "0"',
        '"0"',
        "distributed/test_connection.py::test_each_attempt_of_torchrun_has_its_own_addresses",
    ),
    _fault(
        "A damaged checkpoint is noticed",
        "lambda_det/weights/formats.py",
        "if any(member.CRC for member in archive.infolist()) and (bad := archive.testzip()):",
        "if False and (bad := archive.testzip()):",
        "tools/test_damaged_runs.py::test_a_spoiled_checkpoint_is_made_again_from_the_one_before",
    ),
    _fault(
        "A loss that is not finite stops the run",
        "lambda_det/training/step.py",
        "            finite = finite & grad_norm.isfinite()\n",
        "            pass\n",
        "training/test_step.py::test_a_bad_number_stops_before_the_weights_change",
    ),
    _fault(
        "A loss that is not finite stops the run",
        "lambda_det/training/numerics.py",
        "return bool(x.detach().isfinite().all())",
        "return not bool(x.detach().isnan().any())",
        "training/test_numerics.py::test_an_image_of_nan_is_told_from_a_bad_layer",
    ),
    _fault(
        "bfloat16, float16 with a loss scale",
        "lambda_det/training/step.py",
        "            self.grad_scaler.unscale_(self.optimizer)\n",
        "            pass\n",
        "training/test_precision.py::test_skipped_steps_are_counted",
    ),
    _fault(
        "The losses of five small trainings",
        "lambda_det/training/step.py",
        "total = sum(batch_losses.values()) / self.accumulate",
        "total = sum(batch_losses.values())",
        "reliability/test_golden.py::test_the_losses_are_those_that_were_kept[accumulation]",
    ),
    _fault(
        "The losses of five small trainings",
        "lambda_det/training/step.py",
        "            if self._settings.clipping:\n",
        "            if False:\n",
        "training/test_step.py",
    ),
    _fault(
        "Every key of Detectron2 is read",
        "lambda_det/training/schedules.py",
        '        bias_lr_factor=solver.get("BIAS_LR_FACTOR", 1.0),\n',
        "",
        "detection/test_every_key.py::test_every_key_is_read",
    ),
    _fault(
        "Every key of Detectron2 is read",
        "lambda_det/training/start.py",
        "        with explained(settings, lambda: leaves(read_plain(task.dump()))):\n",
        "        with explained(settings):\n",
        "detection/test_refused_values.py::test_a_command_ends_with_the_sentence_and_2",
    ),
    _fault(
        "Ten heads of Detectron2",
        "lambda_det/detection/registry.py",
        'add_config="add_pointrend_config"',
        'add_config=""',
        "detection/heads/test_heads.py::test_it_trains_and_is_evaluated[point_rend]",
    ),
    _fault(
        "A head of another project",
        "lambda_det/detection/registry.py",
        "    if isinstance(entry, Head) and entry.class_layers:\n",
        "    if False:\n",
        "detection/test_registry.py::test_its_layers_start_afresh_with_other_classes",
    ),
    _fault(
        "Large-scale jitter changes image",
        "lambda_det/detection/data/tile_records.py",
        "area >= LEAST_LEFT * most",
        "area >= LEAST_LEFT * area",
        "detection/data/test_tile_records.py::test_little_that_is_left_is_ignored_and_crowds_stay",
    ),
    _fault(
        "Large-scale jitter changes image",
        "lambda_det/training/stream.py",
        "order = np.lexsort((rng.permutation(len(indices)), groups))",
        "order = rng.permutation(len(indices))",
        "training/test_stream.py::test_files_that_do_not_all_fit_are_drawn_together",
    ),
    _fault(
        "Large-scale jitter changes image",
        "lambda_det/detection/data/jitter.py",
        'image.flip(0) if self.image_format == "BGR" else image',
        "image",
        "detection/data/test_jitter.py"
        "::test_colour_is_that_of_the_image_whatever_the_order_of_its_channels",
    ),
    _fault(
        "Large-scale jitter changes image",
        "lambda_det/detection/data/mapper.py",
        '"recompute_boxes": learns_masks and changes_outlines(augmentations)',
        '"recompute_boxes": False',
        "detection/data/test_mapper.py::test_boxes_are_tight_around_what_the_crop_leaves",
    ),
    _fault(
        "Large-scale jitter changes image",
        "lambda_det/detection/data/mapper.py",
        "image = changed(image)",
        "image",
        "detection/data/test_augmentations.py::test_each_row_of_pixels_changes_the_image_alone",
    ),
    _fault(
        "Evaluation gives pycocotools' figures",
        "lambda_det/detection/evaluation.py",
        "names = [class_names[places[i]] for i in coco_eval.params.catIds]",
        "pass",
        "detection/test_evaluation.py"
        "::test_the_ap_of_a_class_has_its_name_whatever_the_order_of_the_ids",
    ),
    _fault(
        "Evaluation gives pycocotools' figures",
        "lambda_det/detection/panoptic_quality.py",
        "- overlap - overlap[VOID]",
        "- overlap",
        "detection/test_panoptic_quality.py::test_it_counts_as_a_slow_reference",
    ),
    _fault(
        "Small classifiers are trained",
        "lambda_det/classification/task.py",
        "loader = build_eval_loader(cfg, source, batch_size=batch_size)",
        "loader = build_eval_loader(cfg, self.sources.val, batch_size=batch_size)",
        "classification/test_task.py::test_what_a_run_leaves",
    ),
    _fault(
        "Small classifiers are trained",
        "lambda_det/classification/evaluation.py",
        "hits[:, 0].sum(), hits.sum()",
        "hits.sum(), hits[:, 0].sum()",
        "classification/test_evaluation.py::test_counts_are_exact_in_batches_of_any_size",
    ),
    _fault(
        "The paper's classifiers on ImageNet",
        "configs/imagenet/lambda_resnet152_192.yaml",
        "  DROPOUT: 0.3\n",
        "  DROPOUT: 0.2\n",
        "classification/test_recipes.py::test_every_row_of_table_20_has_a_recipe_and_no_other_has",
    ),
    # ----------------------------------------------------------------------------------- own data
    _fault(
        "Labels of each format",
        "lambda_det/own_data/labels/yolo.py",
        "return polygon(name, numbers.reshape(-1, 2) * size)._replace(where=where)",
        "return polygon(name, numbers.reshape(-1, 2) * size[::-1])._replace(where=where)",
        "own_data/test_label_formats.py::test_yolo_polygons",
    ),
    _fault(
        "Labels of each format",
        "lambda_det/detection/data/image_folder.py",
        "if here != root and is_output(here, there, root):",
        "if here == root and is_output(here, there, root):",
        "detection/data/test_image_folder.py::"
        "test_the_folder_of_a_run_is_left_out_of_the_folder_that_it_lies_in",
    ),
    _fault(
        "Ground truth is decided once",
        "lambda_det/detection/data/truth.py",
        "    annotation.update(_sides(max(x0, 0), max(y0, 0), min(x1, width), min(y1, height)))",
        "    pass",
        "detection/data/test_coco.py::test_boxes_over_the_border_are_cut",
    ),
    _fault(
        "Ground truth is decided once",
        "lambda_det/detection/data/truth.py",
        "number in (None, values.size // 3) and ",
        "",
        "detection/data/test_truth.py::test_keypoints_of_another_number_are_taken_away",
    ),
    _fault(
        "Ground truth is decided once",
        "lambda_det/detection/data/ground_truth.py",
        "        or kept.version != _version_of(*place[:2])\n",
        "",
        "detection/data/test_ground_truth.py::test_a_file_or_a_folder_that_changed_is_read_again",
    ),
    _fault(
        "Labels are written as COCO, YOLO and LabelMe",
        "lambda_det/detection/data/label_files.py",
        'f"{value:.9g}"',
        'f"{value:.5g}"',
        "own_data/test_layouts.py::test_the_command_writes_other_formats_and_reads_them_back[yolo]",
    ),
    _fault(
        "A share of the images is held out",
        "lambda_det/own_data/held_out.py",
        "group_of = copies({name: Path(files.get(name, name)) for name in names}, given)",
        "group_of = given or {name: name for name in names}",
        "own_data/test_real_labels.py::test_copies_of_one_image_are_held_out_together",
    ),
    _fault(
        "A share of the images is held out",
        "lambda_det/own_data/held_out.py",
        "rare = min(filter(left.get, left)",
        "rare = max(filter(left.get, left)",
        "own_data/test_held_out.py::test_each_class_has_its_share",
    ),
    _fault(
        "`lambda-det train --data DIR` chooses",
        "lambda_det/own_data/fit_input.py",
        "max(share, statistics.fmean(shares.values())) <= MOST",
        "statistics.fmean(shares.values()) <= MOST",
        "own_data/test_fit_input.py"
        "::test_neither_a_rare_large_class_nor_a_common_one_hides_what_is_small",
    ),
    _fault(
        "`lambda-det train --data DIR` chooses",
        "lambda_det/own_data/fit_input.py",
        "    if asked.has_size:\n",
        "    if False:\n",
        "own_data/test_fit_input.py::test_a_given_size_is_not_exceeded",
    ),
    _fault(
        "`lambda-det train --data DIR` chooses",
        "lambda_det/own_data/fit.py",
        "min(fills, _LOADED * loaders, in_steps)",
        "min(fills, _LOADED * loaders)",
        "own_data/test_fit.py::test_a_light_recipe_fills_a_gpu",
    ),
    _fault(
        "`lambda-det train --data DIR` chooses",
        "lambda_det/own_data/start.py",
        "            read_backbone(place)\n",
        '            return ""\n',
        "own_data/test_start.py::test_a_package_with_a_damaged_start_takes_the_next_one",
    ),
    _fault(
        "`lambda-det train --data DIR` chooses",
        "lambda_det/own_data/start.py",
        '"light_mobilenet_v2_openimages", "light_lambdaresnet26"',
        '"light_lambdaresnet26", "light_mobilenet_v2_openimages"',
        "own_data/test_start.py::test_the_table_says_what_the_start_is",
    ),
    _fault(
        "Evaluations of own data take about a fifth",
        "lambda_det/own_data/fit.py",
        "room = _SHARE / (1 - _SHARE) * steps",
        "room = steps",
        "own_data/test_fit.py::test_evaluations_take_a_fifth_of_the_time_at_most",
    ),
    _fault(
        "Evaluations of own data take about a fifth",
        "lambda_det/training/log.py",
        "        _write_above_bars(screen)\n",
        "",
        "training/test_log.py::test_a_line_and_a_bar_never_share_a_line_of_the_screen",
    ),
    _fault(
        "One page about a run",
        "lambda_det/own_data/report/class_results.py",
        'matrix[row, place[prediction["category_id"]]] += 1',
        'matrix[place[prediction["category_id"]], row] += 1',
        "own_data/report/test_run_page.py::test_confusion_counts_every_object_and_prediction_once",
    ),
    _fault(
        "One page about a run",
        "lambda_det/own_data/report/class_results.py",
        "getAnnIds(catIds=[category], iscrowd=False)",
        "getAnnIds(catIds=[category])",
        "own_data/report/test_run_page.py::test_confusion_counts_every_object_and_prediction_once",
    ),
    _fault(
        "One page about a run",
        "lambda_det/own_data/report/worst_images.py",
        "key=lambda one: one.order)",
        "key=lambda one: one.order, reverse=True)",
        "own_data/report/test_worst_images.py::test_the_worst_come_first",
    ),
    _fault(
        "One page about a run",
        "lambda_det/own_data/report/worst_images.py",
        "evaluated.results[-1].iou_type))",
        "evaluated.results[0].iou_type))",
        "own_data/report/test_worst_images.py::test_masks_decide_where_a_run_has_them",
    ),
    _fault(
        "One page about a run",
        "lambda_det/own_data/report/run_page.py",
        "_add_confusion(page, evaluated.results[-1])",
        "_add_confusion(page, evaluated.results[0])",
        "own_data/report/test_run_page.py::test_the_page_of_a_run_with_masks_counts_by_masks",
    ),
    _fault(
        "One page about a run",
        "lambda_det/own_data/report/advice.py",
        " if run.is_usable else _RULES",
        "",
        "own_data/report/test_advice.py::"
        "test_a_detector_that_is_not_usable_tells_nothing_about_annotations",
    ),
    _fault(
        "One page about a run",
        "lambda_det/own_data/report/advice.py",
        " if p.matched not in doubted]",
        "]",
        "own_data/report/test_advice.py::"
        "test_a_sure_prediction_of_another_class_doubts_the_annotation_and_is_no_pair",
    ),
    _fault(
        "One page about a run",
        "lambda_det/own_data/report/error_types.py",
        '        return "duplicate", int(own.argmax())',
        '        return "class", int(own.argmax())',
        "own_data/report/test_advice.py::test_the_second_prediction_of_an_object_is_one_too_many",
    ),
    _fault(
        "`lambda-det evaluate RUN`",
        "lambda_det/own_data/evaluate.py",
        "saved.content, complete=True, averaged=averaged)",
        "saved.content, complete=True, averaged=False)",
        "own_data/test_evaluate.py::test_parts_of_the_run_s_data",
    ),
    _fault(
        "Results are read with the data that they are of",
        "lambda_det/detection/data/identity.py",
        'ground_truth.annToRLE(a)["counts"],',
        "",
        "detection/data/test_identity.py::test_results_of_other_data_are_refused",
    ),
    _fault(
        "A detector with its model card",
        "lambda_det/own_data/hub.py",
        "initial_weights(content)[0].items()",
        'content["model"].items()',
        "own_data/test_hub.py::test_the_folder_has_a_card_and_nothing_of_this_machine",
    ),
    _fault(
        "Four names for Python",
        "lambda_det/from_python.py",
        "        elif value is not None and value is not False:\n",
        "        elif value:\n",
        "test_from_python.py::test_a_flag_of_0_and_a_path_count",
    ),
    _fault(
        "Four names for Python",
        "lambda_det/own_data/report/reading.py",
        "results_of([line], averaged=True)",
        "results_of([line], averaged=False)",
        "test_from_python.py::test_results_have_the_same_names_for_every_recipe",
    ),
    _fault(
        "Four names for Python",
        "lambda_det/detection/prediction/predictor.py",
        'if is_array and channels == "RGB":',
        'if is_array and channels == "BGR":',
        "detection/prediction/test_predictor.py::test_a_result_is_an_image",
    ),
    # ---------------------------------------------------------------------------------------- use
    _fault(
        "Predictions on images, folders",
        "lambda_det/detection/prediction/annotations.py",
        "_rounded([x0, y0, x1 - x0, y1 - y0])",
        "_rounded([x0, y0, x1, y1])",
        "detection/prediction/test_files.py::test_annotations_are_what_was_found",
    ),
    _fault(
        "Predictions on images, folders",
        "lambda_det/detection/prediction/files.py",
        "    if not 0 < rate < 1000:\n",
        "    if True:\n",
        "detection/prediction/test_files.py::test_a_video_keeps_its_frames_rate_and_size",
    ),
    _fault(
        "Predictions on images, folders",
        "lambda_det/detection/prediction/predictor.py",
        "known = (self._given_threshold, self.best_score, DEFAULT_THRESHOLD)",
        "known = (self._given_threshold, DEFAULT_THRESHOLD, self.best_score)",
        "detection/prediction/test_command_line.py"
        "::test_the_best_score_of_the_run_is_the_threshold_unless_one_is_given",
    ),
    _fault(
        "Predictions on images, folders",
        "lambda_det/detection/matches.py",
        'np.searchsorted(-scores, -thresholds, side="right")',
        'np.searchsorted(-scores, -thresholds, side="left")',
        "detection/test_matches.py::test_the_best_score_has_the_highest_f1_of_the_classes",
    ),
    _fault(
        "Predictions on images, folders",
        "lambda_det/detection/prediction/tables.py",
        "            for file_name, counts in self._counts.items()\n",
        "            for file_name, counts in self._counts.items()\n            if counts\n",
        "detection/prediction/test_files.py::test_tables_of_instances_and_of_counts",
    ),
    _fault(
        "Predictions on images, folders",
        "lambda_det/detection/data/label_files.py",
        "specks = {n for n, area in areas.items() if area < _SPECK and n != largest}",
        "specks = {n for n, area in areas.items() if area < _SPECK}",
        "detection/prediction/test_files.py"
        "::test_outlines_to_correct_have_few_points_and_no_specks",
    ),
    _fault(
        "A checkpoint says what it is of",
        "lambda_det/detection/saved_run.py",
        "self.content, complete=True, averaged=averaged)",
        "self.content, complete=True, averaged=False)",
        "detection/prediction/test_predictor.py::test_the_best_and_averaged_weights_come_first",
    ),
    _fault(
        "A run that Detectron2 trained alone",
        "lambda_det/detection/saved_run.py",
        "    if not beside.is_file():\n        raise WeightsError(",
        "    if True:\n        raise WeightsError(",
        "detection/test_detectron2_runs.py::test_it_is_predicted_and_exported",
    ),
    _fault(
        "A detector as one ONNX file",
        "lambda_det/export/detections.py",
        " & (classes[:, :, None] == classes[:, None])",
        "",
        "export/test_detector.py::test_the_graph_computes_what_detectron2_does[faster_rcnn]",
    ),
    _fault(
        "A detector as one ONNX file",
        "lambda_det/export/session.py",
        "    elif network.why_none:",
        "    elif False:",
        "export/test_command_line.py::test_what_cannot_be_is_refused_first",
    ),
    _fault(
        "A detector as one ONNX file",
        "lambda_det/export/proof.py",
        "return bool(self.rows) and all(",
        "return bool(self.rows) or all(",
        "export/test_proof.py::test_ap_beside_ap",
    ),
    _fault(
        "A detector as one ONNX file",
        "lambda_det/detection/prediction/predictor.py",
        "kept = [instances[instances.scores >= self.score_threshold] for instances in found]",
        "kept = found",
        "export/test_detector.py::test_predictor_reads_a_file_alone_and_fills_its_batches",
    ),
    _fault(
        "A backbone as ONNX",
        "lambda_det/export/session.py",
        "all(map(passes, self.errors.values()))",
        "any(map(passes, self.errors.values()))",
        "export/test_backbone.py::test_a_graph_for_one_size_only_is_found_out",
    ),
    _fault(
        "`accelerate(model)` makes",
        "lambda_det/cpu/folding.py",
        "shift = -norm.running_mean.to(dtype) if bias is None",
        "shift = norm.running_mean.to(dtype) if bias is None",
        "cpu/test_accelerate.py"
        "::test_a_model_of_detectron2_computes_the_same_and_gets_back_what_it_was[RetinaNet]",
    ),
    # ----------------------------------------------------------------------------- the repository
    _fault(
        "Two commands from a clone",
        "Makefile",
        "\t@rm -f $@ $(PROJECT)\n",
        "",
        "test_makefile.py::test_a_set_up_cut_short_starts_from_nothing",
    ),
    _fault(
        "No compiled code is needed to install",
        "setup.py",
        '"*.cpp", "*.cu", "*.h"',
        '"*.cpp", "*.h"',
        "test_packaging.py::test_wheel_holds_every_module_and_config_and_nothing_else",
    ),
    _fault(
        "No compiled code is needed to install",
        "setup.py",
        '"files/*.pth"',
        '"files/lambda*.pth"',
        "test_packaging.py::test_wheel_holds_every_module_and_config_and_nothing_else",
    ),
    _fault(
        "PyTorch 2.4 to 2.15",
        ".github/workflows/test.yml",
        '          - "3.12:2.4.1"\n',
        "",
        "test_release.py::test_the_versions_are_the_same_everywhere",
    ),
    _fault(
        "Detectron2 is installed where it is not",
        "lambda_det/install_detectron2.py",
        '.replace(CARRIER_IMPORT.encode(), b"detectron2")',
        "",
        "test_install_detectron2.py::test_the_import_name_is_restored_everywhere",
    ),
    _fault(
        "`lambda-det doctor` names",
        "lambda_det/doctor.py",
        "    if result != expected:\n",
        "    if False:\n",
        "test_doctor.py::test_a_package_that_does_not_work",
    ),
    _fault(
        "The tutorial, its notebook",
        "docs/keys.md",
        "- `INPUT.LSJ.SIZE` (`1024`)",
        "- `INPUT.LSJ.SIZE` (`512`)",
        "test_docs.py::test_the_page_of_keys_has_what_the_code_has",
    ),
    _fault(
        "Imports run one way",
        "lambda_det/layers/options.py",
        "from lambda_det.errors import ConfigError\n",
        "from lambda_det.errors import ConfigError\nfrom lambda_det.modeling import specs\n",
        "test_structure.py::test_imports_run_one_way",
    ),
    _fault(
        "Imports run one way",
        "lambda_det/detection/config.py",
        "is None else load_config(args, file)",
        "is None else load_config(args)",
        "training/test_config_file.py::test_a_command_opens_each_file_once",
    ),
    _fault(
        "Imports run one way",
        "lambda_det/own_data/flags.py",
        "from lambda_det.detection.config import Prepared\n",
        "from lambda_det.detection.config import Prepared\n"
        "from lambda_det.own_data.labels.table import COCO\n",
        "test_imports.py::test_the_import_changes_nothing_of_pytorch_and_imports_no_wing",
    ),
]


def copied(folder: Path) -> Path:
    """Copy the files that git knows or would add, as they are now."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # git also lists what was removed since
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    return folder


def run_tests(tree: Path, tests: Sequence[str], log: Path, seconds: float) -> int | None:
    """Run tests of a copy until one fails.

    Returns:
        The status of pytest; None where it did not end in time. Processes that the tests left are
        ended.
    """
    words = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=short", *tests]
    variables = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    # Not by a pipe: what is left behind would hold it open
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=tree,
            env={**os.environ, **variables},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):  # it left none
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def verdict(fault: Fault, tree: Path, log: Path) -> str:
    """What the tests of a fault say of it: "seen", or what else happened."""
    file = tree / fault.file
    text = file.read_text("utf-8")
    if text.count(fault.text) != 1:
        return f"{fault.file} has its text {text.count(fault.text)} times"
    file.write_text(text.replace(fault.text, fault.wrong), "utf-8")
    try:
        status = run_tests(tree, fault.tests, log, SECONDS)
    finally:
        file.write_text(text, "utf-8")
    if status is None:
        return f"NO END after {SECONDS} s"
    return {0: "NOT SEEN", 1: "seen"}.get(status, f"pytest ended with status {status}")


def main(argv: Sequence[str] | None = None) -> int:
    command = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument("word", nargs="?", default="", help="only faults that have it")
    word = command.parse_args(argv).word
    chosen = [fault for fault in FAULTS if any(word in part for part in fault[:4])]
    unseen = []
    with tempfile.TemporaryDirectory(prefix="faults_") as name:
        tree, log = copied(Path(name, "tree")), Path(name, "log")
        tests = sorted({test for fault in chosen for test in fault.tests})
        print(f"{len(chosen)} faults; first their tests without a fault", flush=True)
        if run_tests(tree, tests, log, SECONDS * len(chosen)) != 0:
            print(f"The tests fail without a fault:\n{log.read_text()[-5000:]}")
            return 1
        for fault in chosen:
            start = time.monotonic()
            found = verdict(fault, tree, log)
            seconds = time.monotonic() - start
            print(f"{found}, {seconds:.0f} s: {fault.promise} ({fault.file})", flush=True)
            if found != "seen":
                unseen.append(fault)
                print(log.read_text()[-2000:] if log.exists() else "", flush=True)
    print(f"{len(chosen) - len(unseen)} of {len(chosen)} faults were seen")
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main())
