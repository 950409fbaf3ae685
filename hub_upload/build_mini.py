"""Put the small embedding model into the package: bf16 weights, tokenizer, and a card with what was measured.

    python hub_upload/build_mini.py --stages runs/mini-distilled runs/mini-paired --corpus runs/documentation

`make mini` trains the stages first; the last one ships, or the mean of several. The card's figures are measured on the
packages that the corpus holds out.
"""

from neobert_hf.hub.mini import main

if __name__ == "__main__":
    main()
