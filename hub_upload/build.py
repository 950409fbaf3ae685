"""Build the folder that goes to the Hub: weights, config, tokenizer, modules of sentence-transformers, model code and a card.

python hub_upload/build.py --model DIR_OR_ID --out HUB_DIR [--model_id org/name] [--license ID] [--language en]
python hub_upload/push.py HUB_DIR org/name
"""

from neobert_hf.hub.build import main

if __name__ == "__main__":
    main()
